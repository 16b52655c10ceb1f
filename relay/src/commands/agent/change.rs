//! What an operator may write after `agent set`: the keys, their ranges, and what of it contradicts itself.
//!
//! The table's own CHECKs state the same rules for everybody; here they are known in the operator's words, so that one call
//! names all that is wrong with it.

use std::time::Duration;

use shared::settings;
use sqlx::postgres::types::PgInterval;

use super::sql::{Agent, Change};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_mins(1);
const HOUR: Duration = Duration::from_hours(1);
const DAY: Duration = Duration::from_hours(24);

/// The durations of a policy: least and most.
const DURATIONS: [(&str, Duration, Duration); 7] = [
    ("debounce", Duration::ZERO, MINUTE),
    ("max_wait", Duration::ZERO, HOUR),
    ("retry_backoff", Duration::ZERO, DAY),
    ("retry_backoff_max", Duration::ZERO, Duration::from_hours(24 * 7)),
    ("lease", SECOND, HOUR),
    ("turn_timeout", Duration::from_millis(1), Duration::from_hours(24 * 7)),
    ("dispatch_timeout", Duration::from_millis(500), HOUR),
];
/// The numbers of a policy: least and most.
const NUMBERS: [(&str, i32, i32); 3] =
    [("max_turn_messages", 1, 1000), ("max_attempts", 1, 100), ("max_content_bytes", 1, 1 << 20)];

/// The keys and what each may be, for the command's help.
pub(super) fn keys() -> String {
    let words = humantime::format_duration;
    let durations =
        DURATIONS.iter().map(|&(key, from, to)| (key, words(from).to_string(), words(to).to_string()));
    let numbers = NUMBERS.iter().map(|&(key, from, to)| (key, from.to_string(), to.to_string()));
    let rows = durations.chain(numbers).map(|(key, from, to)| format!("  {key:<18} {from} to {to}\n"));
    format!(
        "Keys:\n{}  paused             true or false\n\n\
         debounce must not be over max_wait, nor retry_backoff over retry_backoff_max.",
        rows.collect::<String>()
    )
}

/// Reads every pair, and reports every pair that cannot be read.
pub(super) fn parse(pairs: &[String]) -> (Change, Vec<String>) {
    let mut change = Change::default();
    let problems = pairs.iter().filter_map(|pair| apply(&mut change, pair).err()).collect();
    (change, problems)
}

fn apply(change: &mut Change, pair: &str) -> Result<(), String> {
    let (key, value) = pair.split_once('=').ok_or_else(|| format!("{pair:?} is not KEY=VALUE"))?;
    match key {
        "debounce" => set(&mut change.debounce, key, interval(key, value)),
        "max_wait" => set(&mut change.max_wait, key, interval(key, value)),
        "max_turn_messages" => set(&mut change.max_turn_messages, key, number(key, value)),
        "max_attempts" => set(&mut change.max_attempts, key, number(key, value)),
        "retry_backoff" => set(&mut change.retry_backoff, key, interval(key, value)),
        "retry_backoff_max" => set(&mut change.retry_backoff_max, key, interval(key, value)),
        "lease" => set(&mut change.lease, key, interval(key, value)),
        "turn_timeout" => set(&mut change.turn_timeout, key, interval(key, value)),
        "dispatch_timeout" => set(&mut change.dispatch_timeout, key, interval(key, value)),
        "max_content_bytes" => set(&mut change.max_content_bytes, key, number(key, value)),
        "paused" => {
            let answer = value.parse().map_err(|_| format!("must be true or false, not {value:?}"));
            set(&mut change.paused, key, answer)
        }
        _ => Err(format!("{key:?} is no key of an agent: see relay agent set --help")),
    }
}

fn set<T>(slot: &mut Option<T>, key: &str, value: Result<T, String>) -> Result<(), String> {
    let value = value.map_err(|what| format!("{key} {what}"))?;
    if slot.replace(value).is_some() { Err(format!("{key} is given twice")) } else { Ok(()) }
}

fn number(key: &str, value: &str) -> Result<i32, String> {
    let (from, to) = range(&NUMBERS, key)?;
    settings::number(from..=to)(value)
}

fn interval(key: &str, value: &str) -> Result<PgInterval, String> {
    let (from, to) = range(&DURATIONS, key)?;
    let duration = settings::duration(from..=to)(value)?;
    let microseconds = i64::try_from(duration.as_micros()).map_err(|error| error.to_string())?;
    Ok(PgInterval { months: 0, days: 0, microseconds })
}

fn range<T: Copy>(ranges: &[(&str, T, T)], key: &str) -> Result<(T, T), String> {
    let found = ranges.iter().find(|(of, _, _)| *of == key);
    found.map(|&(_, from, to)| (from, to)).ok_or_else(|| "has no range".to_owned())
}

/// What a policy contradicts itself in.
pub(super) fn contradictions(agent: &Agent) -> Vec<String> {
    let pairs = [
        ("debounce", &agent.debounce, "max_wait", &agent.max_wait),
        ("retry_backoff", &agent.retry_backoff, "retry_backoff_max", &agent.retry_backoff_max),
    ];
    let over = pairs.into_iter().filter(|(_, value, _, most)| value.0 > most.0);
    over.map(|(key, value, limit, most)| format!("{key} ({value}) must not be over {limit} ({most})"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_that_cannot_be_read_is_named_at_once() {
        let pairs = [
            "lease=20",
            "debounce",
            "leaze=1s",
            "paused=yes",
            "max_attempts=3",
            "max_attempts=4",
            "max_turn_messages=1001",
            "dispatch_timeout=499ms",
        ];
        let (_, problems) = parse(&pairs.map(str::to_owned));
        let named = [
            "lease must be a duration such as 500ms, 10s or 5m, from 1s to 1h, not \"20\"",
            "\"debounce\" is not KEY=VALUE",
            "\"leaze\" is no key of an agent: see relay agent set --help",
            "paused must be true or false, not \"yes\"",
            "max_attempts is given twice",
            "max_turn_messages must be a number from 1 to 1000, not \"1001\"",
            "dispatch_timeout must be a duration such as 500ms, 10s or 5m, from 500ms to 1h, not \"499ms\"",
        ];
        assert_eq!(problems, named);
    }

    #[test]
    fn a_change_names_only_what_it_changes() {
        let (change, problems) = parse(&["lease=1m 30s".to_owned(), "paused=true".to_owned()]);
        assert_eq!(change.lease.unwrap().microseconds, 90_000_000);
        assert_eq!((change.paused, change.max_attempts, problems.len()), (Some(true), None, 0));
    }
}
