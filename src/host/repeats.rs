//! Counting of log lines that repeat.
//!
//! The first of several equal lines is written, the others are counted, and after a while one line says how many there
//! were. Two lines are alike if level, target and text are the same but for digits: offsets and sizes differ from one
//! failed read to the next. A number in a name counts (`layers/3/wq`), so that each file that fails is named, up to
//! `NAMES_MAX` of them.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    time::{Duration, Instant},
};

/// How long equal lines are counted before the count is written.
pub const WINDOW: Duration = Duration::from_mins(1);

/// Lines that are alike but have other names in them, written one by one in a window.
const NAMES_MAX: usize = 8;

/// Kinds of lines that are remembered; at one more the oldest is forgotten.
const KINDS_MAX: usize = 256;

/// One kind of line.
#[derive(Debug)]
struct Kind {
    since: Instant,
    /// Hashes of the lines that were written, numbers in names included.
    written: Vec<u64>,
    counted: u64,
    last: String,
}

/// The table of lines seen lately.
#[derive(Debug, Default)]
pub struct Repeats {
    kinds: HashMap<u64, Kind>,
}

impl Repeats {
    /// Notes a line. Whether it is to be written, and what was counted of a kind that made room for it.
    pub fn note(&mut self, line: &str, now: Instant) -> (bool, Option<String>) {
        let (alike, named) = (hash_without(line, false), hash_without(line, true));
        if let Some(kind) = self.kinds.get_mut(&alike) {
            let is_new = !kind.written.contains(&named) && kind.written.len() < NAMES_MAX;
            if is_new {
                kind.written.push(named);
            } else {
                kind.counted += 1;
                line.clone_into(&mut kind.last);
            }
            return (is_new, None);
        }
        let mut forgotten = None;
        if self.kinds.len() >= KINDS_MAX
            && let Some(oldest) = self.kinds.iter().min_by_key(|(_, kind)| kind.since).map(|(key, _)| *key)
        {
            forgotten = self.kinds.remove(&oldest).and_then(|kind| kind.summary(now));
        }
        self.kinds.insert(alike, Kind { since: now, written: vec![named], counted: 0, last: String::new() });
        (true, forgotten)
    }

    /// Forgets the kinds whose window has ended; what was counted of them.
    pub fn expired(&mut self, now: Instant) -> Vec<String> {
        self.take(now, |kind| now.duration_since(kind.since) >= WINDOW)
    }

    /// Forgets all kinds; what was counted of them.
    pub fn all(&mut self, now: Instant) -> Vec<String> {
        self.take(now, |_| true)
    }

    /// When the next window ends.
    pub(crate) fn next_end(&self) -> Option<Instant> {
        self.kinds.values().map(|kind| kind.since + WINDOW).min()
    }

    fn take(&mut self, now: Instant, which: impl Fn(&Kind) -> bool) -> Vec<String> {
        let ended = self.kinds.extract_if(|_, kind| which(kind)).map(|(_, kind)| kind);
        let mut ended: Vec<Kind> = ended.collect();
        ended.sort_by_key(|kind| kind.since);
        ended.into_iter().filter_map(|kind| kind.summary(now)).collect()
    }
}

impl Kind {
    /// How many of its lines were not written, since the first one was, and the last of them, which names its own level and target.
    fn summary(self, now: Instant) -> Option<String> {
        let seconds = now.duration_since(self.since).as_secs().max(1);
        (self.counted > 0)
            .then(|| format!("repeated {} times in {seconds} s: {}", self.counted, self.last.trim_start()))
    }
}

/// Hash of a line without its numbers; `keep_names` keeps those that are part of a word or path.
fn hash_without(line: &str, keep_names: bool) -> u64 {
    let mut hasher = DefaultHasher::new();
    for word in line.split_inclusive([' ', '=', ',', ';', '"', '(', ')', ':']) {
        let is_name = keep_names && word.bytes().any(|byte| byte.is_ascii_alphabetic() || byte == b'/');
        if is_name {
            word.hash(&mut hasher);
        } else {
            word.split(|c: char| c.is_ascii_digit())
                .filter(|part| !part.is_empty())
                .for_each(|part| part.hash(&mut hasher));
        }
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_lines_are_counted_and_summed_up() {
        let mut repeats = Repeats::default();
        let start = Instant::now();
        let line =
            |at: u32| format!("ERROR ckfs: read failed: gone file=\"layers/3/wq\" start={at} end={}", at * 7 + 10);
        assert_eq!(repeats.note(&line(0), start), (true, None));
        for at in 1..=132 {
            assert_eq!(repeats.note(&line(at), start), (false, None));
        }
        assert!(repeats.expired(start).is_empty());
        assert_eq!(repeats.next_end(), Some(start + WINDOW));
        let summary = format!("repeated 132 times in 60 s: {}", line(132));
        assert_eq!(repeats.expired(start + WINDOW), [summary]);
        assert_eq!((repeats.next_end(), repeats.note(&line(7), start)), (None, (true, None)));
    }

    #[test]
    fn each_file_is_named_up_to_a_limit() {
        let mut repeats = Repeats::default();
        let now = Instant::now();
        let written = (0..100).filter(|n| repeats.note(&format!("layers/{n}/wq: gone, offset {n}"), now).0).count();
        assert_eq!(written, NAMES_MAX);
        assert!(repeats.all(now)[0].starts_with(&format!("repeated {} times in 1 s: layers/99/wq", 100 - NAMES_MAX)));
    }

    #[test]
    fn other_words_are_other_lines_and_the_table_is_bounded() {
        let mut repeats = Repeats::default();
        let now = Instant::now();
        for n in 0..2000_u32 {
            let word: String = n.to_string().bytes().map(|digit| char::from(digit - b'0' + b'a')).collect();
            assert_eq!(repeats.note(&word, now), (true, None));
        }
        assert_eq!(repeats.kinds.len(), KINDS_MAX);
        assert!(repeats.note("ERROR x: y", now).0 && repeats.note(" WARN x: y", now).0);
    }

    #[test]
    fn what_is_forgotten_for_want_of_room_is_summed_up() {
        let mut repeats = Repeats::default();
        let now = Instant::now();
        repeats.note("first 1", now);
        repeats.note("first 2", now);
        let later = now + Duration::from_secs(1);
        let words = (0..KINDS_MAX).map(|n| "x".repeat(n + 1));
        let summaries: Vec<_> = words.filter_map(|word| repeats.note(&word, later).1).collect();
        assert_eq!(summaries, ["repeated 1 times in 1 s: first 2"]);
    }
}
