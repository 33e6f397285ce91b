//! The verb `status`: draws the rings and groups of a sidecar as text. A ring is a circle of slots. Each slot holds the
//! messages whose deadline is in one tick (one second by default). The pointer of the ring moves one slot per tick. A
//! group is a set of subscribers that share timeout batches, the lists of messages that were not acknowledged in time.

use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::io::{IsTerminal, Write, stdout};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tokio::task::spawn_blocking;

use super::admin_address::AdminAddress;
use super::text::{COLUMNS, escaped_json, fitted, padded, span, span_of_seconds, whole};
use super::{Failure, block_on};
use crate::admin::status::{GroupReport, RatesReport, StatusReport};
use crate::core::{RingStatus, Tick, TickReport};
use crate::ticker::RECENT_TICKS;

/// The maximum number of rows per ring, so that the output fits a screen. If a ring has more slots, each row sums
/// several slots.
const MAX_ROWS: usize = 30;

/// The width of the longest bar, in columns. A line of label, bar and message count then has at most 80 columns.
const BAR: usize = 40;
/// The width of a message count, in columns.
const COUNT: usize = 18;

/// The maximum width of a leader's name in a sentence, in columns. The leader of a ring is the sidecar that moves its
/// pointer.
const MAX_LEADER: usize = 48;
/// The width of a leader's name in the table of several rings, in columns.
const LEADER: usize = 22;

/// How often `--watch` shows the status.
const REPEAT_EVERY: Duration = Duration::from_secs(1);
/// The sequence that moves the cursor of a terminal to the top left and clears the screen.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// The width of a group's name in the table, in columns.
const GROUP: usize = 24;

/// The age above which a waiting batch is reported as a problem: twice the time after which an unacknowledged batch is
/// redelivered by default.
const LONG_WAIT: Duration = Duration::from_secs(60);

/// A pointer counts as stalled if it is late by more than this time, and also by more than [`TICKS_BEHIND`] ticks. A
/// pointer that is less late may be about to move.
const LONG_BEHIND: Duration = Duration::from_secs(2);
/// A pointer counts as stalled if it is late by more ticks than this, and also by more than [`LONG_BEHIND`].
const TICKS_BEHIND: u32 = 2;

/// Show the ring, slot by slot, and the groups
///
/// A ring of many slots is drawn in at most 30 rows. Several rings have a line each, and --ring draws one of them. `!`
/// marks a problem.
#[derive(Args, Debug)]
pub(super) struct Status {
    #[command(flatten)]
    admin: AdminAddress,
    /// Print JSON, as GET /status does
    #[arg(long)]
    json: bool,
    /// The ring to draw slot by slot, if there are several [default: none]
    #[arg(long, value_name = "N", conflicts_with = "json")]
    ring: Option<u16>,
    /// Show the status again every second, until Ctrl-C
    #[arg(long)]
    watch: bool,
}

impl Status {
    pub(super) fn run(self) -> Result<(), Failure> {
        if self.watch {
            return block_on(self.repeat());
        }
        let mut out = stdout().lock();
        write!(out, "{}", self.shown(self.admin.timeout)?)?;
        Ok(out.flush()?)
    }

    /// Shows the status every second until Ctrl-C. A sidecar that does not answer is shown too.
    async fn repeat(self) -> Result<(), Failure> {
        let status = Arc::new(self);
        let is_terminal = stdout().is_terminal();
        // One future for the whole loop: a new one would miss a signal that comes between two rounds.
        let mut interrupted = pin!(tokio::signal::ctrl_c());
        loop {
            let once = Arc::clone(&status);
            let next = async {
                let shown = spawn_blocking(move || once.shown(Duration::ZERO)).await.map_err(Failure::run)?;
                let text = match shown {
                    Err(Failure::Run(error)) => format!("{error}\n"),
                    shown => shown?,
                };
                let (before, after) = if is_terminal { (CLEAR, "") } else { ("", "\n") };
                let mut out = stdout();
                write!(out, "{before}{text}{}", if status.json { "" } else { after })?;
                out.flush()?;
                tokio::time::sleep(REPEAT_EVERY).await;
                Ok::<(), Failure>(())
            };
            tokio::select! {
                _ = &mut interrupted => return Ok(()),
                shown = next => shown?,
            }
        }
    }

    /// Asks for the status, and returns it as it is printed. For the time `wait`, waits for a sidecar that starts.
    fn shown(&self, wait: Duration) -> Result<String, Failure> {
        let (report, text) = self.admin.report(wait)?;
        if self.json { Ok(escaped_json(&text)) } else { draw(&report, self.ring) }
    }
}

fn draw(report: &StatusReport, only: Option<u16>) -> Result<String, Failure> {
    let drawn = |ring: &&RingStatus| only.is_none_or(|only| only == ring.ring);
    let rings: Vec<&RingStatus> = report.rings.iter().filter(drawn).collect();
    if let (Some(number), []) = (only, &rings[..]) {
        let count = report.rings.len();
        return Err(Failure::Usage(format!("--ring {number}: there are {count} rings, numbered from 0")));
    }
    let mut text = String::new();
    draw_status(&mut text, report, &rings).expect("a string takes every text");
    Ok(text)
}

fn draw_status(text: &mut String, report: &StatusReport, rings: &[&RingStatus]) -> fmt::Result {
    let tick = humantime::format_duration(Duration::from_millis(u64::from(report.tick_ms)));
    writeln!(text, "store {}, {} slots of {tick}", fitted(&report.store, MAX_LEADER), report.slots)?;
    draw_sidecar(text, report)?;
    draw_notes(text, report)?;
    match rings {
        [ring] => draw_ring(text, ring, report.tick_ms)?,
        rings => draw_rings(text, rings, report.tick_ms)?,
    }
    text.push('\n');
    draw_groups(text, &report.groups)
}

/// Draws the version, the uptime and the rates of the sidecar. An older sidecar does not report them.
fn draw_sidecar(text: &mut String, report: &StatusReport) -> fmt::Result {
    let StatusReport { version, uptime_seconds, rates, .. } = report;
    if version.is_empty() {
        return Ok(());
    }
    writeln!(text, "version {}, up for {}", fitted(version, LEADER), span_of_seconds(*uptime_seconds))?;
    let RatesReport { seconds, adds, dels, timeouts } = rates;
    let window = span_of_seconds(*seconds);
    writeln!(text, "{adds:.1} adds, {dels:.1} dels, {timeouts:.1} timeouts per second in the last {window}")
}

/// Draws a note for each kind of problem, or a line that says that there is no problem. One kind is a storm: a tick
/// with so many timeouts that a fault on the server side is likely. Only the leader of a ring knows its storms. If
/// another sidecar leads a ring, also draws a hint to ask that sidecar.
fn draw_notes(text: &mut String, report: &StatusReport) -> fmt::Result {
    let StatusReport { tick_ms, rings, groups, .. } = report;
    let begin = text.len();
    let (all_rings, all_groups) = (format!("{} rings", rings.len()), format!("{} groups", groups.len()));
    let unled = rings.iter().filter(|ring| ring.leader.is_none()).count();
    let standing = rings.iter().filter(|ring| stands_still(ring, *tick_ms)).count();
    let held_up: Vec<&str> = rings.iter().filter_map(|ring| ring.waits.as_deref()).collect();
    let waiting = groups.iter().filter(|group| waits_long(group)).count();
    // Check only the memory store: if sidecars share a Redis store, the group may have subscribers at other sidecars.
    let alone =
        |group: &&GroupReport| report.store == "memory" && group.outbox_batches > 0 && group.subscribers == 0;
    let deserted = groups.iter().filter(alone).count();
    let limit = span(LONG_WAIT);
    note(text, "led by nobody", unled, &all_rings, STOPPED)?;
    note(text, "led, but the pointer is stalled", standing, &all_rings, STOPPED)?;
    if let [why, ..] = held_up[..] {
        let (count, why) = (held_up.len(), fitted(why, COLUMNS - 2));
        writeln!(text, "! this sidecar may not move the pointer of {count} of {all_rings}:\n  {why}")?;
    }
    draw_storms(text, report)?;
    let old = format!("batches older than {limit}");
    note(text, &old, waiting, &all_groups, "; does a subscriber acknowledge?")?;
    note(text, "groups with batches and no subscriber", deserted, &all_groups, "")?;
    if text.len() == begin {
        writeln!(text, "ok: every ring is led, and no batch has waited for more than {limit}")?;
    }
    if rings.iter().any(|ring| !ring.leads && ring.leader.is_some()) {
        writeln!(text, "only the leader of a ring reports its storms: ask it too")?;
    }
    Ok(())
}

const STOPPED: &str = "; nothing times out there";

/// Draws a line for a problem. `count` is the number of rings or groups with this problem, and `all` is their total as
/// a text. Draws nothing if `count` is 0.
fn note(text: &mut String, problem: &str, count: usize, all: &str, advice: &str) -> fmt::Result {
    if count > 0 { writeln!(text, "! {problem}: {count} of {all}{advice}") } else { Ok(()) }
}

/// Draws the latest storm among the recent ticks of all rings, if there is one.
fn draw_storms(text: &mut String, report: &StatusReport) -> fmt::Result {
    let storms = report.rings.iter().flat_map(|ring| storms(ring).map(move |tick| (tick, ring.ring)));
    let storms: Vec<(&TickReport, u16)> = storms.collect();
    let Some((last, ring)) = storms.iter().max_by_key(|(tick, _)| tick.tick) else { return Ok(()) };
    let of = if report.rings.len() > 1 { format!(" of ring {ring}") } else { String::new() };
    let more = if storms.len() > 1 { format!(", the last of {}", storms.len()) } else { String::new() };
    let (tick, timed_out, added) = (last.tick, whole(last.timed_out), whole(last.added));
    writeln!(
        text,
        "! storm{of} in tick {tick}{more}:\n  {timed_out} of {added} messages timed out; look for a fault between"
    )?;
    writeln!(text, "  clients and logic nodes before marking clients offline")
}

/// Returns the storms among the last [`RECENT_TICKS`] ticks before the pointer of a ring.
fn storms(ring: &RingStatus) -> impl Iterator<Item = &TickReport> {
    let Tick(pointer) = ring.pointer;
    let last = pointer.saturating_sub(RECENT_TICKS as u64)..pointer;
    ring.recent.iter().filter(move |tick| tick.storm && last.contains(&tick.tick))
}

/// Returns whether the ring has a leader, but its pointer counts as stalled. See [`LONG_BEHIND`].
pub(super) fn stands_still(ring: &RingStatus, tick_ms: u32) -> bool {
    let ticks = Duration::from_millis(tick_ms.into()) * TICKS_BEHIND;
    ring.leader.is_some() && ring.pointer_lag_seconds > LONG_BEHIND.max(ticks).as_secs_f64()
}

fn waits_long(group: &GroupReport) -> bool {
    group.outbox_batches > 0 && group.oldest_seconds > LONG_WAIT.as_secs_f64()
}

fn mark(marked: bool, mark: char) -> char {
    if marked { mark } else { ' ' }
}

/// Draws one ring: its leader, pointer and message counts, then a bar for each slot or for several slots together.
fn draw_ring(text: &mut String, ring: &RingStatus, tick_ms: u32) -> fmt::Result {
    write!(text, "\nring {}, led by ", ring.ring)?;
    match (&ring.leader, ring.lease_age_seconds) {
        (None, _) => writeln!(text, "nobody: its pointer stands until a sidecar is elected")?,
        (Some(name), None) => writeln!(text, "{}", fitted(name, MAX_LEADER))?,
        (Some(name), Some(age)) => writeln!(text, "{} for {}", fitted(name, MAX_LEADER), span_of_seconds(age))?,
    }
    let slots = ring.slots.len();
    let at = usize::try_from(ring.pointer.0.checked_rem(slots as u64).unwrap_or_default()).unwrap_or_default();
    write!(text, "pointer {} (slot {at}), epoch {}", ring.pointer, ring.epoch)?;
    if stands_still(ring, tick_ms) {
        write!(text, ", stalled, {} behind", span_of_seconds(ring.pointer_lag_seconds))?;
    }
    writeln!(text, "\n{} in flight, {} closing", whole(ring.in_flight), whole(ring.closing))?;
    let per_row = slots.div_ceil(MAX_ROWS).max(1);
    let counts: Vec<u64> = ring.slots.chunks(per_row).map(|slots| total(slots.iter().copied())).collect();
    let most = counts.iter().copied().max().unwrap_or_default().max(1);
    for (row, count) in counts.into_iter().enumerate() {
        let (first, last) = (row * per_row, ((row + 1) * per_row).min(slots) - 1);
        let label = if per_row == 1 { format!("slot {first:>4}") } else { format!("slots {first:>4}-{last:<4}") };
        let mark = mark((first..=last).contains(&at), '>');
        let bar = "#".repeat(length(count, most));
        writeln!(text, "{mark} {label} |{bar:<BAR$}| {:>COUNT$}", whole(count))?;
    }
    Ok(())
}

/// Returns the sum of counts. A server may send any counts, so an overflow must not panic.
fn total(counts: impl Iterator<Item = u64>) -> u64 {
    counts.fold(0, u64::saturating_add)
}

/// Returns the width of a bar in columns: 0 for a count of 0, and at least 1 for any other count. `most` is the count
/// of the longest bar.
fn length(count: u64, most: u64) -> usize {
    let columns = (u128::from(count) * BAR as u128).div_ceil(u128::from(most));
    usize::try_from(columns).unwrap_or(BAR)
}

/// Draws several rings, one line each.
fn draw_rings(text: &mut String, rings: &[&RingStatus], tick_ms: u32) -> fmt::Result {
    let [age, number, in_flight, closing] = ["for", "pointer", "in flight", "closing"];
    writeln!(text, "\n  ring  {:<LEADER$} {age:>5} {number:>13} {in_flight:>13} {closing:>13}", "led by")?;
    let mut empty = Vec::new();
    for ring in rings {
        let leader = padded(ring.leader.as_deref().unwrap_or("nobody"), LEADER);
        let age = ring.lease_age_seconds.map(span_of_seconds).unwrap_or_default();
        let is_wrong = ring.leader.is_none() || stands_still(ring, tick_ms) || storms(ring).next().is_some();
        if !is_wrong && ring.in_flight == 0 && rings.len() > 1 {
            empty.push(*ring);
            continue;
        }
        let (mark, number, pointer) = (mark(is_wrong, '!'), ring.ring, ring.pointer);
        let (in_flight, closing) = (whole(ring.in_flight), whole(ring.closing));
        writeln!(text, "{mark} {number:>4}  {leader} {age:>5} {pointer:>13} {in_flight:>13} {closing:>13}")?;
    }
    if !empty.is_empty() {
        let leaders: BTreeSet<&str> = empty.iter().filter_map(|ring| ring.leader.as_deref()).collect();
        let leaders: Vec<&str> = leaders.into_iter().collect();
        let line = format!("  {} empty rings, led by {}", empty.len(), leaders.join(", "));
        writeln!(text, "{}", fitted(&line, COLUMNS))?;
    }
    let in_flight = whole(total(rings.iter().map(|ring| ring.in_flight)));
    writeln!(text, "{in_flight} in flight; slot by slot: ackwheel status --ring N")
}

/// Draws the groups, with the batches that wait for their subscribers.
pub(super) fn group_table(groups: &[GroupReport]) -> String {
    let mut text = String::new();
    draw_groups(&mut text, groups).expect("a string takes every text");
    text
}

fn draw_groups(text: &mut String, groups: &[GroupReport]) -> fmt::Result {
    group_row(text, ' ', "group", ["subscribers here", "batches", "unacked", "oldest"].map(String::from))?;
    for group in groups {
        let mut name = fitted(&group.group, COLUMNS - 2);
        let mark = mark(waits_long(group), '!');
        // Group names are ASCII, so the number of bytes is the width in columns. A long name gets its own line and is
        // not cut, because long names often differ only at their ends.
        if name.len() > GROUP {
            writeln!(text, "{mark} {name}")?;
            name.clear();
        }
        let counts = [group.subscribers, group.outbox_batches, group.unacked_batches].map(whole);
        let [subscribers, batches, unacked] = counts;
        let is_empty = group.outbox_batches == 0;
        let oldest = if is_empty { String::from("-") } else { span_of_seconds(group.oldest_seconds) };
        group_row(text, mark, &name, [subscribers, batches, unacked, oldest])?;
    }
    Ok(())
}

fn group_row(text: &mut String, mark: char, name: &str, columns: [String; 4]) -> fmt::Result {
    let [subscribers, batches, unacked, oldest] = columns;
    writeln!(text, "{mark} {name:<GROUP$} {subscribers:>16} {batches:>13} {unacked:>13} {oldest:>7}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(number: u16, leader: Option<&str>, slots: Vec<u64>) -> RingStatus {
        RingStatus {
            ring: number,
            pointer: Tick(1_792_000_001),
            epoch: 1_792_000_000_000,
            leader: leader.map(String::from),
            lease_age_seconds: leader.map(|_| 86_399.6),
            leads: false,
            pointer_lag_seconds: 0.0,
            waits: None,
            in_flight: slots.iter().sum::<u64>() + 7,
            slots,
            closing: 7,
            recent: Vec::new(),
        }
    }

    fn group(name: &str, outbox_batches: u64, oldest_seconds: f64) -> GroupReport {
        let group = String::from(name);
        GroupReport { group, subscribers: 2, outbox_batches, unacked_batches: 3, oldest_seconds }
    }

    fn report(rings: Vec<RingStatus>, groups: Vec<GroupReport>) -> StatusReport {
        let slots = rings.first().map_or(0, |ring| u16::try_from(ring.slots.len()).unwrap());
        StatusReport { store: "redis".into(), slots, tick_ms: 1_000, rings, groups, ..StatusReport::default() }
    }

    fn drawn(report: &StatusReport, only: Option<u16>) -> String {
        let text = draw(report, only).unwrap();
        assert!(text.lines().all(|line| line.chars().count() <= COLUMNS), "{text}");
        text
    }

    #[test]
    fn one_ring_is_drawn_slot_by_slot_with_its_pointer() {
        let long = "n".repeat(128);
        for (leader, words) in [
            (Some("logic-node-17:7415"), "\n\nring 0, led by logic-node-17:7415 for 23h\n"),
            (Some(long.as_str()), "nn… for 23h\n"),
            (None, "\n\nring 0, led by nobody: "),
        ] {
            let text = drawn(&report(vec![ring(0, leader, vec![1_000_000_000, 0, 5])], Vec::new()), None);
            assert!(text.contains(words), "{text}");
            let at = 1_792_000_001 % 3;
            assert!(text.contains(&format!("pointer 1792000001 (slot {at}), epoch 1792000000000\n")), "{text}");
            assert!(text.contains("\n1,000,000,012 in flight, 7 closing\n"), "{text}");
            assert_eq!(text.matches(&format!("\n> slot {at:>4} ")).count(), 1, "{text}");
            assert!(text.contains(&format!("|{}|", "#".repeat(BAR))), "{text}");
            assert!(text.contains(&format!("|#{}| {:>COUNT$}\n", " ".repeat(BAR - 1), 5)), "a small bar: {text}");
        }
    }

    #[test]
    fn many_slots_are_summed_in_rows() {
        let text = drawn(&report(vec![ring(0, Some("a"), vec![1_000_000_000; 3_600])], Vec::new()), None);
        let rows: Vec<&str> = text.lines().filter(|line| line.contains(" slots ") && line.contains('|')).collect();
        assert_eq!(rows.len(), 30, "{text}");
        assert!(rows[0].starts_with("  slots    0-119 ") && rows[29].starts_with("  slots 3480-3599"), "{text}");
        assert!(rows.iter().all(|row| row.ends_with(" 120,000,000,000")), "{text}");
        let pointer = 1_792_000_001 % 3_600 / 120;
        assert!(rows[pointer].starts_with('>') && text.matches("\n>").count() == 1, "{text}");
        let text = drawn(&report(vec![ring(0, Some("a"), vec![1_000_000_000_000; 31])], Vec::new()), None);
        assert_eq!(text.matches('|').count(), 2 * 16, "the last row has one slot: {text}");
        assert!(text.contains("slots   30-30 "), "{text}");
    }

    #[test]
    fn several_rings_have_a_line_each_and_one_can_be_asked_for() {
        let wide = "節".repeat(40);
        let leaders = [Some("logic-node-17.rack-4.example:7415"), None, Some(wide.as_str())];
        let rings = (0..).zip(leaders).map(|(number, leader)| ring(number, leader, vec![1_000_000_000; 15]));
        let report = report(rings.collect(), Vec::new());
        let text = draw(&report, None).unwrap();
        assert!(text.lines().all(|line| console::measure_text_width(line) <= COLUMNS), "{text}");
        assert!(text.contains("\n! led by nobody: 1 of 3 rings; nothing times out there\n"), "{text}");
        assert!(text.contains("\n     0  logic-node-17.rack-4.…   23h    1792000001 15,000,000,007"), "{text}");
        assert!(text.contains("\n!    1  nobody "), "{text}");
        assert!(text.contains("\n45,000,000,021 in flight; "), "{text}");
        let text = drawn(&report, Some(1));
        assert!(text.contains("\nring 1, led by nobody") && text.matches(" slot ").count() == 15, "{text}");
        let error = draw(&report, Some(3)).unwrap_err().to_string();
        assert!(error.contains("--ring 3") && error.contains("3 rings"), "{error}");
    }

    #[test]
    fn a_pointer_that_stands_still_is_told_unless_it_is_about_to_move() {
        let behind = |tick_ms: u32, seconds: f64| {
            let ring = RingStatus { pointer_lag_seconds: seconds, ..ring(1, Some("a"), vec![0; 15]) };
            let mut report = report(vec![ring, super::tests::ring(0, Some("b"), vec![0; 15])], Vec::new());
            report.tick_ms = tick_ms;
            report
        };
        let note = "\n! led, but the pointer is stalled: 1 of 2 rings; nothing times out there\n";
        for (tick_ms, seconds, stands) in [
            (1_000, 2.0, false),
            (1_000, 2.1, true),
            (100, 1.9, false),
            (100, 2.1, true),
            (30_000, 60.0, false),
            (30_000, 61.0, true),
            (1_000, f64::MAX, true),
        ] {
            let report = behind(tick_ms, seconds);
            let text = drawn(&report, None);
            assert_eq!(text.contains(note), stands, "{text}");
            assert_eq!(text.contains("\nok: "), !stands, "{text}");
            assert_eq!((text.contains("\n!    1  a "), text.contains("\n     0  b ")), (stands, true), "{text}");
            assert_eq!(drawn(&report, Some(1)).contains(", stalled, "), stands);
        }
        let mut unled = behind(1_000, 60.0);
        unled.rings[0].leader = None;
        assert!(!drawn(&unled, None).contains("stalled"), "a ring is reported for one reason only");
    }

    #[test]
    fn a_storm_among_the_last_ticks_is_told() {
        let Tick(pointer) = ring(0, None, Vec::new()).pointer;
        let tick = |tick: u64, storm: bool| TickReport { tick, added: 2_000, acked: 188, timed_out: 1_812, storm };
        let of = |recent: Vec<TickReport>| RingStatus { recent, ..ring(3, Some("a"), vec![0; 15]) };
        // Not reported: a storm more than 60 ticks before the pointer, a tick without a storm, and a storm at the
        // pointer.
        for recent in [vec![tick(pointer - 61, true)], vec![tick(pointer - 1, false)], vec![tick(pointer, true)]] {
            let text = drawn(&report(vec![of(recent)], Vec::new()), None);
            assert!(text.contains("\nok: ") && !text.contains("! storm"), "{text}");
            assert!(text.contains("\nonly the leader of a ring reports its storms: ask it too\n"), "{text}");
        }
        let text = drawn(&report(vec![of(vec![tick(pointer - 60, true)])], Vec::new()), None);
        let words = ":\n  1,812 of 2,000 messages timed out; look for a fault between\n  clients and logic nodes \
                     before marking clients offline\n";
        assert!(text.contains(&format!("\n! storm in tick {}{words}", pointer - 60)), "{text}");
        assert!(!text.contains("\nok: "), "{text}");
        let recent = vec![tick(pointer - 5, true), tick(pointer - 4, false), tick(pointer - 2, true)];
        let rings = vec![ring(2, Some("a"), vec![0; 15]), of(recent)];
        let text = drawn(&report(rings, Vec::new()), None);
        let expected = format!("\n! storm of ring 3 in tick {}, the last of 2{words}", pointer - 2);
        assert!(text.contains(&expected), "{text}");
        assert!(text.contains("\n     2  a ") && text.contains("\n!    3  a "), "{text}");
    }

    #[test]
    fn a_sum_of_counts_that_overflows_does_not_panic() {
        let mut rings = vec![ring(0, Some("a"), vec![0; 62]), ring(1, Some("a"), vec![0; 62])];
        rings[0].slots.fill(u64::MAX);
        for ring in &mut rings {
            ring.in_flight = u64::MAX;
        }
        let report = report(rings, Vec::new());
        assert!(draw(&report, None).unwrap().contains("\n18,446,744,073,709,551,615 in flight; "));
        assert!(draw(&report, Some(0)).unwrap().contains("| 18,446,744,073,709,551,615\n"));
    }

    #[test]
    fn groups_keep_their_names_and_those_that_wait_are_marked() {
        let long = "g".repeat(64);
        let groups =
            vec![group("default", 0, 0.0), group(&long, 1_000_000_000, 86_400.0), group("audit", 4, 60.0)];
        let text = drawn(&report(vec![ring(0, Some("a"), vec![0])], groups.clone()), None);
        assert!(text.contains("\n! batches older than 1m: 1 of 3 groups; "), "{text}");
        assert!(text.contains(&format!("\n! {long}\n!   ")), "{text}");
        assert!(text.contains(" 1,000,000,000             3     24h\n"), "{text}");
        assert!(text.contains("      0             3       -\n"), "no batch, so no age: {text}");
        assert!(text.contains("\n  default ") && text.contains("\n  audit "), "{text}");
        assert!(!text.contains("\nok: "), "{text}");
        let led = RingStatus { leads: true, ..ring(0, Some("a"), vec![0]) };
        let mut alone = report(vec![led], vec![GroupReport { subscribers: 0, ..group("default", 1, 0.0) }]);
        assert!(drawn(&alone, None).contains("\nok: "), "other sidecars may have subscribers of the group");
        alone.store = String::from("memory");
        let text = drawn(&alone, None);
        assert!(text.contains("\n! groups with batches and no subscriber: 1 of 1 groups\n"), "{text}");
        assert!(!text.contains("\nok: ") && !text.contains("ask it too"), "{text}");
        let text = drawn(&report(vec![ring(0, Some("a"), vec![0])], groups[..1].to_vec()), None);
        assert!(text.contains("\nok: every ring is led, and no batch has waited for more than 1m\n"), "{text}");
    }
}
