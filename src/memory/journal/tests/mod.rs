//! The state that recovery finds is one that a client could have seen, wherever the files end.

mod life;

use std::fs;
use std::sync::Arc;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use self::life::{Content, Life, blocks_of, copies, journal_options, options, recovered};
use super::Journal;
use super::segment::{HEAD_LENGTH, SegmentHead};
use crate::clock::Clock;

fn recovers_what_was_there(threads: usize, seed: u64, with_checkpoints: bool) {
    let mut life = Life::begin(threads, seed);
    for step in 0..200 {
        life.step();
        if with_checkpoints && step % 50 == 30 {
            life.checkpoint();
        }
        if step % 70 == 65 {
            life.restart(threads);
        }
        if step % 10 == 9 {
            // Another number of threads spreads the messages over other shards.
            let (content, recovered) = recovered(&copies(&life.files()), 3 - threads);
            assert_eq!(content, Content::of(&life.wheel), "seed {seed}, step {step}");
            assert_eq!(recovered.damages, []);
        }
    }
}

#[test]
fn recovery_finds_what_was_there() {
    for seed in 0..6 {
        recovers_what_was_there(1 + usize::try_from(seed % 2).unwrap(), seed, false);
    }
}

#[test]
fn recovery_finds_what_was_there_behind_checkpoints() {
    for seed in 100..106 {
        recovers_what_was_there(1 + usize::try_from(seed % 2).unwrap(), seed, true);
    }
}

#[test]
fn a_journal_that_is_cut_anywhere_gives_the_state_before_the_torn_write() {
    let mut compared = 0;
    for seed in 200..204 {
        // After each step: the blocks of the segment, and the content.
        let (mut life, mut states) = (Life::begin(1, seed), Vec::new());
        while life.files().len() == 1 {
            life.step();
            states.push((blocks_of(&fs::read(&life.files()[0]).unwrap()), Content::of(&life.wheel)));
        }
        let files = copies(&life.files());
        let mut random = SmallRng::seed_from_u64(seed);
        for _ in 0..250 {
            let end = random.random_range(states[0].0.1..states[states.len() - 2].0.1);
            let cut = [(files[0].0.clone(), files[0].1[..end].to_vec())];
            let (content, recovered) = recovered(&cut, 1);
            assert_eq!(recovered.damages, [], "a torn write is no damage");
            let next = states.partition_point(|((_, length), _)| *length <= end);
            let (((before, _), known), ((after, _), _)) = (&states[next - 1], &states[next]);
            // A step that writes several blocks has states in between.
            if after - before == 1 {
                assert_eq!(content, *known, "seed {seed}, cut at {end}");
                compared += 1;
            }
        }
    }
    assert!(compared >= 500, "only {compared} of 1000 cuts were compared");
}

#[test]
fn damage_is_reported_with_its_place_and_costs_only_what_is_in_it() {
    let mut life = Life::begin(1, 7);
    (0..100).for_each(|_| life.step());
    // Damage in the last block cannot be told from a torn write.
    let files = copies(&life.files());
    let (_, end) = blocks_of(&files[0].1);
    let (mut random, mut reported) = (SmallRng::seed_from_u64(7), 0);
    for _ in 0..100 {
        let mut damaged = files.clone();
        let at = random.random_range(0..end);
        damaged[0].1[at] ^= 1 << random.random_range(0..8);
        let (_, recovered) = recovered(&damaged, 1);
        for damage in &recovered.damages {
            assert!(damage.offset <= at && at < damage.offset + damage.bytes, "{damage:?} and not {at}");
        }
        assert!(recovered.damages.len() <= 1);
        reported += recovered.damages.len();
    }
    assert!(reported >= 90, "only {reported} of 100 flipped bits were reported");
}

#[test]
fn a_segment_with_a_damaged_head_is_read_with_that_of_its_neighbour() {
    let mut life = Life::begin(1, 8);
    while life.files().len() < 3 {
        life.step();
    }
    life.step();
    let files = copies(&life.files());
    for damaged in 0..files.len() {
        let mut files = files.clone();
        files[damaged].1[30] ^= 1;
        let (content, recovered) = recovered(&files, 1);
        assert_eq!(content, Content::of(&life.wheel), "segment {damaged}");
        assert_eq!(recovered.damages.len(), 1);
    }
}

#[test]
fn blocks_of_an_earlier_use_of_a_segment_are_not_valid() {
    let mut life = Life::begin(1, 9);
    (0..30).for_each(|_| life.step());
    let content = Content::of(&life.wheel);
    let [(path, bytes)] = &copies(&life.files())[..] else { panic!("one segment is enough") };
    let mut earlier = bytes.clone();
    // The head of a later process, before the blocks of an earlier one: a power failure can leave that.
    let mut head = SegmentHead::decode(bytes).unwrap();
    head.epoch += 1;
    earlier[..HEAD_LENGTH].copy_from_slice(&head.encode());
    let (found, recovered) = recovered(&[(path.clone(), earlier)], 1);
    assert_ne!(found, content);
    assert_eq!((found.in_flight.len(), recovered.damages), (0, vec![]));
}

#[test]
fn an_epoch_is_above_that_of_a_process_that_could_not_write_a_segment() {
    let folder = tempfile::tempdir().unwrap();
    let clock = Arc::new(Clock::start());
    let epoch = clock.moment().unix_ms() + 3_600_000;
    fs::write(folder.path().join("lock"), epoch.to_le_bytes()).unwrap();
    for later in 1..3 {
        let (journal, wheel, _) = Journal::open(&journal_options(folder.path()), options(1), &clock).unwrap();
        assert_eq!(wheel.epoch, epoch + later, "the clock is behind it");
        journal.close().unwrap();
        for file in fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path()) {
            if !file.ends_with("lock") {
                fs::remove_file(file).unwrap();
            }
        }
    }
}
