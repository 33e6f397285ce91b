//! The ring on a page, in a real Chromium: what it shows is what the status says, by mouse, by keyboard, on a phone,
//! in the dark, and when something is wrong.
//!
//! `cargo test --release page::pictures::screenshots` writes pictures to `target/page-screenshots`, and
//! `cargo test --release page::pictures::of_the_docs -- --ignored` makes those in docs again.

mod pictures;

use std::process::Stdio;
use std::time::Instant;

use ackwheel::admin::status::StatusReport;
use ackwheel::core::Message;
use ackwheel::core::ring_of;
use serde_json::{Value, json};

use crate::replay;
use crate::support::browser::{Browser, View};
use crate::support::frames;
use crate::support::process::{Process, program};
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::{PATIENCE, wait_until};

const DESKTOP: View = View { width: 1_280, height: 900, dark: false };
const PHONE: View = View { width: 390, height: 844, dark: false };
const SMALL_PHONE: View = View { width: 320, height: 568, dark: true };

/// A wheel that stands while a test looks at it.
const STANDS: [&str; 2] = ["--tick", "30s"];

/// Every figure that the page shows, read off it in one moment.
const FIGURES: &str = "(() => {
  const text = (id) => document.getElementById(id).textContent;
  const slots = [...document.querySelectorAll('#slots .slot')].map((slot) => slot.getAttribute('aria-label'));
  const rows = [...document.querySelectorAll('#groups tbody tr')];
  return {
    pointer: text('fact-pointer'), epoch: text('fact-epoch'), leader: text('fact-leader').split(',')[0],
    store: text('fact-store'), in_flight: text('in-flight'), closing: text('chosen-figure'),
    slots: slots.map((label) => label.match(/: (.*) in flight/)[1]),
    sums: [text('sum-added'), text('sum-acked'), text('sum-lost')],
    groups: rows.map((row) => [...row.children].slice(0, 4).map((cell) => cell.textContent)),
  };
})()";

/// The texts that the page must show for a report.
fn figures(report: &StatusReport) -> Value {
    let ring = &report.rings[0];
    let recent = ring.recent.iter().filter(|tick| tick.tick + 60 >= ring.pointer.0);
    let sums = recent.fold([0, 0, 0], |[added, acked, timed_out], tick| {
        [added + tick.added, acked + tick.acked, timed_out + tick.timed_out]
    });
    let groups = report.groups.iter().map(|group| {
        let counts = [group.subscribers, group.outbox_batches, group.unacked_batches].map(grouped);
        [vec![group.group.clone()], counts.to_vec()].concat()
    });
    json!({
        "pointer": ring.pointer.to_string(),
        "epoch": ring.epoch.to_string(),
        "leader": ring.leader.as_deref().unwrap_or("nobody"),
        "store": report.store,
        "in_flight": grouped(ring.in_flight),
        "closing": grouped(ring.closing),
        "slots": ring.slots.iter().copied().map(grouped).collect::<Vec<_>>(),
        "sums": sums.map(grouped),
        "groups": groups.collect::<Vec<_>>(),
    })
}

/// A number as people write it: 1,234,567.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&[u8]> = digits.as_bytes().rchunks(3).rev().collect();
    groups.iter().map(|group| str::from_utf8(group).unwrap()).collect::<Vec<_>>().join(",")
}

#[test]
fn a_page_of_a_stranger_whose_name_points_here_reads_nothing() {
    let rules = "--host-resolver-rules=MAP evil.example 127.0.0.1";
    let Some(mut browser) = Browser::start_with(&[rules]) else { return };
    let sidecar = Sidecar::start(&[]);
    for (host, status, word) in [("evil.example", 421, "--admin-host"), ("localhost", 200, "in_flight")] {
        browser.open(&format!("http://{host}:{}/nowhere", sidecar.admin.port()), DESKTOP);
        let read = browser.value("fetch('/status').then(async (answer) => [answer.status, await answer.text()])");
        assert_eq!(read[0], status, "{host}: {read}");
        assert!(read[1].as_str().unwrap().contains(word), "{host}: {read}");
    }
}

fn page_of(sidecar: &Sidecar) -> String {
    format!("http://{}/", sidecar.admin)
}

/// Waits until the page shows the status of the sidecar, and returns that; fails with both if it never does.
#[track_caller]
fn shown(browser: &mut Browser, sidecar: &Sidecar) -> StatusReport {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let shown = browser.value(FIGURES);
        let report = sidecar.status();
        if shown == figures(&report) {
            return report;
        }
        assert!(Instant::now() < deadline, "shown: {shown:#}\nsaid: {:#}", figures(&report));
    }
}

/// Ten messages more for each tick farther away.
fn fill(sidecar: &Sidecar) {
    let mut connection = sidecar.connect();
    for ticks in 1..=15_u16 {
        let first = u64::from(ticks) * 1_000;
        let ids: Vec<u64> = (first..first + 10 * u64::from(ticks)).collect();
        connection.ask(&frames::add(&ids, ticks, 1)).added();
    }
}

fn text(browser: &mut Browser, id: &str) -> String {
    browser.value(&format!("document.getElementById({id:?}).textContent")).as_str().unwrap().to_owned()
}

#[test]
fn every_slot_shows_its_figure_to_mouse_and_keyboard() {
    let Some(mut browser) = Browser::start() else { return };
    let sidecar = Sidecar::start(&STANDS);
    browser.open(&page_of(&sidecar), DESKTOP);
    fill(&sidecar);
    browser.wait_until("document.getElementById('in-flight').textContent === '1,200'");
    let ring = shown(&mut browser, &sidecar).rings.remove(0);

    // By height and by number.
    let drawn = browser.value(
        "[...document.querySelectorAll('#slots .slot')].map((slot) => \
         [Number(slot.querySelector('.bar').getAttribute('d').match(/A([0-9.]+)/)[1]), \
          slot.querySelector('.count').textContent])",
    );
    for (slot, count) in ring.slots.iter().enumerate() {
        let height = drawn[slot][0].as_f64().unwrap() - 134.0;
        let expected = 74.0 * f64::from(u32::try_from(*count).unwrap()) / 150.0;
        assert!((height - expected).abs() < 0.01, "slot {slot} of {count} is {height} high");
        assert_eq!(drawn[slot][1], grouped(*count));
    }

    // By mouse.
    browser.click("#slots [data-slot='3'] .count");
    assert_eq!(text(&mut browser, "chosen-title"), "Slot 3");
    assert_eq!(text(&mut browser, "chosen-figure"), grouped(ring.slots[3]));
    assert_eq!(browser.value("document.querySelector('[aria-selected=true]').dataset.slot"), "3");
    // By keyboard, onwards from there.
    for (key, code, slot) in [("ArrowRight", 39, 4), ("End", 35, 14), ("ArrowDown", 40, 0), ("ArrowLeft", 37, 14)]
    {
        browser.press(key, code);
        assert_eq!(text(&mut browser, "chosen-title"), format!("Slot {slot}"));
        assert_eq!(text(&mut browser, "chosen-figure"), grouped(ring.slots[slot]));
        assert_eq!(browser.value("document.activeElement.dataset.slot"), slot.to_string());
    }
    browser.press("Escape", 27);
    assert_eq!(text(&mut browser, "chosen-title"), "Closing");
    // By keyboard alone, from the top of the page: the first stop is the slot under the pointer.
    browser.open(&page_of(&sidecar), DESKTOP);
    browser.wait_until("document.body.dataset.state === 'live'");
    browser.press("Tab", 9);
    browser.press("Enter", 13);
    let pointer = usize::try_from(ring.pointer.0 % 15).unwrap();
    assert_eq!(text(&mut browser, "chosen-title"), format!("Slot {pointer}"));
    let outline = "getComputedStyle(document.activeElement.querySelector('.track')).strokeWidth";
    assert_eq!(browser.value(outline), "4px", "the focus is seen");
    assert_eq!(browser.complaints(), [] as [Value; 0]);
}

/// im_replay on a sidecar; where there is no real trace it makes one up.
fn replayed(sidecar: &Sidecar, seconds: u64) -> Process {
    let mut command = replay::example();
    command.args(["--seconds", &seconds.to_string(), "--addr", &sidecar.listen.to_string()]);
    if let Some(trace) = replay::real_trace() {
        command.arg("--trace").arg(trace);
    }
    Process::spawn(command.stdout(Stdio::null()).stderr(Stdio::null()))
}

#[test]
fn a_live_page_shows_one_answer_and_says_when_there_is_none() {
    let Some(mut browser) = Browser::start() else { return };
    let mut sidecar = Sidecar::start(&["--tick", "200ms"]);
    browser.open(&page_of(&sidecar), PHONE);
    browser.wait_until("document.body.dataset.state === 'live'");
    let mut replay = replayed(&sidecar, 6);
    let mut pointer = 0_u64;
    for _ in 0..4 {
        browser.wait_until(&format!(
            "Number(document.getElementById('fact-pointer').textContent) > {pointer} && \
             Number(document.getElementById('sum-acked').textContent.replace(',', '')) > 0"
        ));
        let shown = browser.value(FIGURES);
        // While the figures were read, the next answer may have come.
        let answers = browser.answers(&format!("{}status", page_of(&sidecar)), 2);
        let said: Vec<Value> =
            answers.iter().map(|answer| figures(&serde_json::from_str(answer).unwrap())).collect();
        assert!(said.contains(&shown), "shown: {shown:#}\nsaid: {said:#?}");
        pointer = shown["pointer"].as_str().unwrap().parse().unwrap();
    }
    assert_eq!(replay.exit().code(), Some(0), "the replay was as it must be");
    assert_eq!(browser.complaints(), [] as [Value; 0]);

    let color = "getComputedStyle(document.body).getPropertyValue('--old')";
    let (live, live_color) = (text(&mut browser, "state"), browser.value(color));
    assert_eq!(live, "live");
    sidecar.kill();
    browser.wait_until("document.body.dataset.state === 'lost'");
    let notice = text(&mut browser, "notices");
    assert!(notice.starts_with("The connection to the sidecar is lost since "), "{notice}");
    assert!(text(&mut browser, "state").starts_with("connection lost, last answer "));
    assert_eq!(text(&mut browser, "caption"), "in flight then");
    assert_ne!(browser.value(color), live_color, "an old ring is grey");
    assert!(browser.value("document.title").as_str().unwrap().starts_with("lost · "));

    // Another one at the same place: the page goes on by itself.
    let admin = sidecar.admin.to_string();
    let mut command = program(&["serve", "--listen", "127.0.0.1:0", "--admin", &admin]);
    let sidecar = Sidecar::spawn(&mut command);
    browser.wait_until("document.body.dataset.state === 'live'");
    assert_eq!(text(&mut browser, "notices"), "");
    assert_eq!(text(&mut browser, "name"), sidecar.status().sidecar);
}

#[test]
fn a_script_that_is_not_of_the_page_does_not_run() {
    let Some(mut browser) = Browser::start() else { return };
    let sidecar = Sidecar::start(&[]);
    browser.open(&page_of(&sidecar), DESKTOP);
    browser.wait_until("document.body.dataset.state === 'live'");
    assert_eq!(browser.complaints(), [] as [Value; 0]);
    let foreign = "document.body.append(Object.assign(document.createElement('script'), \
                   { textContent: 'window.foreign = 1' })), window.foreign === undefined";
    assert_eq!(browser.value(foreign), true);
    wait_until("the browser tells of it", || {
        browser.complaints().iter().any(|complaint| complaint.to_string().contains("Content Security Policy"))
    });
}

#[test]
fn a_storm_and_a_group_without_a_subscriber_are_shown() {
    let Some(mut browser) = Browser::start() else { return };
    let sidecar = Sidecar::start(&["--tick", "200ms", "--storm-min", "50"]);
    browser.open(&page_of(&sidecar), SMALL_PHONE);
    let (tick, _) = sidecar.connect().ask(&frames::add(&(1..=50).collect::<Vec<_>>(), 1, 1)).added();
    browser.wait_until("document.getElementById('notices').children.length === 2");
    let notices = text(&mut browser, "notices");
    assert!(notices.contains(&format!("Storm in tick {tick}: 50 of 50 messages timed out.")), "{notices}");
    assert!(notices.contains("Group default has batches waiting and no subscriber."), "{notices}");
    assert_eq!(text(&mut browser, "storms").trim(), "1 storm");
    let asking = browser.value("show('asking'), [find('notices').children.length, document.title[0]]");
    assert_eq!(asking, json!([2, "!"]), "while it asks, what needed a look still does");
    // Not by colour alone: a mark above the tick, and its words.
    let mark = "getComputedStyle(document.querySelector('.ticks .storm'), '::before').content";
    assert_eq!(browser.value(mark), "\"▲\"");
    let words = browser.value(
        "(() => { const strip = document.getElementById('ticks'); strip.focus(); \
         const back = [...strip.children].findIndex((tick) => tick.classList.contains('storm')); \
         for (let step = 59; step > back; step--) \
           strip.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowLeft' })); \
         return strip.getAttribute('aria-valuetext'); })()",
    );
    assert_eq!(words, format!("tick {tick}: 50 added, 0 acked, 50 timed out, a storm"));
}

#[test]
fn a_tick_that_is_not_counted_says_why_and_one_to_come_is_no_storm() {
    let Some(mut browser) = Browser::start() else { return };
    let sidecar = Sidecar::start(&STANDS);
    browser.open(&page_of(&sidecar), DESKTOP);
    browser.wait_until("document.body.dataset.state === 'live'");
    let mut words = |leads: bool, last: u64, age: Option<u64>| {
        let recent = json!([{ "tick": last }]);
        let ring = json!({ "pointer": 1_000, "leads": leads, "recent": recent, "lease_age_seconds": age });
        browser.value(&format!("tickWords(999, undefined, {ring})"))
    };
    let (published, not_counted) = ("tick 999: being published", "tick 999: not counted by this sidecar");
    assert_eq!(words(true, 998, None), published, "the next to be counted");
    assert_eq!(words(true, 998, Some(60)), published);
    assert_eq!(words(true, 900, Some(3)), not_counted, "another led when it was decided");
    assert_eq!(words(false, 998, None), not_counted, "another leads");
    let mut found = |tick: u64| {
        let storm = json!([{ "tick": tick, "storm": true, "added": 9, "timed_out": 9 }]);
        let ring = json!({ "ring": 0, "pointer": 1_000, "leader": "a", "recent": storm });
        browser.value(&format!("troubles({ring}).length"))
    };
    assert_eq!([939, 940, 999, 1_000].map(&mut found), [0, 1, 1, 0], "of the last 60 ticks");
}

#[test]
fn a_shared_ring_says_who_leads_and_when_nobody_does() {
    let Some(mut browser) = Browser::start() else { return };
    let mut redis = Redis::start();
    let follower = Sidecar::on(&redis, "follower", &["--rings", "2", "--never-lead"]);
    browser.open(&page_of(&follower), DESKTOP);
    browser.wait_until("document.getElementById('notices').children.length === 2");
    let notices = text(&mut browser, "notices");
    assert!(notices.contains("Nobody leads ring 0: ") && notices.contains("Nobody leads ring 1: "), "{notices}");
    let _leader = Sidecar::on(&redis, "leader", &["--rings", "2"]);
    browser.wait_until("document.getElementById('notices').children.length === 0");
    shown(&mut browser, &follower);
    let words = "This sidecar follows. Ticks are counted by the sidecar that decides them. That is leader now; \
                 its page shows them.";
    assert_eq!(text(&mut browser, "ticks-words"), words);
    assert_eq!(browser.value("document.getElementById('ticks-drawn').hidden"), true);

    // The other ring, by mouse and by keyboard.
    browser.click("#rings input[value='1']");
    let of_ring_1: Vec<u64> = (0..100).filter(|id| ring_of(Message::new(*id, 0), 2) == 1).collect();
    follower.connect().ask(&frames::add(&of_ring_1, 15, 1)).added();
    let in_flight = |count: usize| format!("document.getElementById('in-flight').textContent === '{count}'");
    browser.wait_until(&in_flight(of_ring_1.len()));
    browser.press("ArrowLeft", 37);
    assert_eq!(browser.value(&in_flight(0)), true);
    assert_eq!(browser.complaints(), [] as [Value; 0]);

    redis.kill();
    browser.wait_until("document.body.dataset.state === 'refused'");
    let notice = text(&mut browser, "notices");
    assert!(notice.starts_with("The sidecar cannot tell how the ring stands: "), "{notice}");
    assert_eq!(text(&mut browser, "caption"), "in flight then");
}

#[test]
fn a_ring_of_one_slot_and_one_of_3600_are_drawn() {
    let Some(mut browser) = Browser::start() else { return };
    for slots in ["1", "3600"] {
        let sidecar = Sidecar::start(&["--slots", slots, "--tick", "30s"]);
        sidecar.connect().ask(&frames::add(&[1, 2, 3], 1, 1)).added();
        browser.open(&page_of(&sidecar), SMALL_PHONE);
        browser.wait_until("document.body.dataset.state === 'live'");
        assert_fits(&mut browser, SMALL_PHONE);
        browser.press("Tab", 9);
        browser.press("End", 35);
        let last = slots.parse::<usize>().unwrap() - 1;
        assert_eq!(text(&mut browser, "chosen-title"), format!("Slot {last}"));
        assert_eq!(text(&mut browser, "chosen-figure"), sidecar.status().rings[0].slots[last].to_string());
        let box_of_bars = "document.querySelector('#outline, .bar').getBBox().width";
        assert!(browser.value(box_of_bars).as_f64().unwrap() > 200.0, "the ring is there");
        if slots == "3600" {
            let next = usize::try_from((sidecar.pointer() + 1) % 3_600).unwrap();
            let said = "document.getElementById('whole').getAttribute('aria-valuetext')";
            browser.value(&format!("choose({next}, true)"));
            assert!(
                browser
                    .value(said)
                    .as_str()
                    .unwrap()
                    .starts_with(&format!("slot {next}: 3 in flight, closes in 1 tick"))
            );
        }
        assert_eq!(browser.complaints(), [] as [Value; 0]);
    }
}

/// Nothing lies outside of the width.
#[track_caller]
fn assert_fits(browser: &mut Browser, view: View) {
    assert_eq!(browser.value("innerWidth"), view.width);
    let width = browser.value("document.documentElement.scrollWidth").as_u64().unwrap();
    assert!(width <= u64::from(view.width), "{width} wide on {view:?}");
}

/// Texts whose contrast is below what WCAG asks for at AA: 4.5, or 3 where they are large.
const PALE_TEXTS: &str = "(() => {
  const channels = (color) => color.match(/[0-9.]+/g).map(Number);
  const light = (color) => channels(color).slice(0, 3).map((one) => one / 255)
    .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
  const paper = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return channels(color)[3] === 0 ? paper(element.parentElement) : color;
  };
  const texts = [...document.querySelectorAll('main *, header *, footer *')].filter((element) =>
    [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) && element.checkVisibility());
  const pale = texts.map((element) => {
    const style = getComputedStyle(element), ink = element instanceof SVGElement ? style.fill : style.color;
    const [bright, dark] = [light(ink), light(paper(element))].sort((one, other) => other - one);
    return [(bright + 0.05) / (dark + 0.05), parseFloat(style.fontSize) >= 24 ? 3 : 4.5, element.textContent];
  });
  return { count: texts.length, pale: pale.filter(([contrast, least]) => contrast < least) };
})()";

#[test]
fn texts_stand_out_and_nothing_is_cut_off() {
    let Some(mut browser) = Browser::start() else { return };
    let mut sidecar = Sidecar::start(&["--tick", "200ms", "--storm-min", "50"]);
    sidecar.connect().ask(&frames::add(&(1..=50).collect::<Vec<_>>(), 1, 1)).added();
    let mut connection = sidecar.connect();
    connection.ask(&frames::subscribe(&"g".repeat(64), 1, 0));
    browser.open(&page_of(&sidecar), DESKTOP);
    browser.wait_until("document.getElementById('notices').children.length === 2");
    let check = |browser: &mut Browser| {
        for view in
            [DESKTOP, PHONE, SMALL_PHONE].into_iter().flat_map(|view| [view, View { dark: !view.dark, ..view }])
        {
            browser.look(view);
            assert_fits(browser, view);
            let found = browser.value(PALE_TEXTS);
            assert!(found["count"].as_u64().unwrap() > 60, "{found:#}");
            assert_eq!(found["pale"], json!([]), "{view:?}");
        }
    };
    check(&mut browser);
    sidecar.kill();
    browser.wait_until("document.body.dataset.state === 'lost'");
    check(&mut browser);
}
