//! What the processes log is for people who do not read Rust.

use std::path::Path;

use anyhow::{Result, ensure};
use tests::programs;

fn sources(directory: &Path, found: &mut Vec<(String, String)>) -> Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            sources(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push((path.display().to_string(), std::fs::read_to_string(&path)?));
        }
    }
    Ok(())
}

/// The events that a source logs: from the macro's name to the end of its arguments.
fn events(source: &str) -> impl Iterator<Item = &str> {
    let levels = ["trace!(", "debug!(", "info!(", "warn!(", "error!("];
    source.split("tracing::").skip(1).filter_map(move |rest| {
        levels.iter().any(|level| rest.starts_with(level)).then_some(())?;
        let mut depth = 0;
        let end = rest.char_indices().find(|(_, char)| {
            depth += i32::from(*char == '(') - i32::from(*char == ')');
            depth == 0 && *char == ')'
        });
        Some(&rest[..end?.0])
    })
}

#[test]
fn no_event_carries_the_debug_form_of_a_value() -> Result<()> {
    let mut found = Vec::new();
    for part in ["relay/src", "consumer/src", "shared/src"] {
        sources(&programs::root().join(part), &mut found)?;
    }
    let mut seen = 0;
    for (path, source) in &found {
        for event in events(source) {
            seen += 1;
            let is_debug = |part: &str| part.trim_start_matches(['(', ' ', '\n']).starts_with('?');
            let fields = event.split_once('(').map_or("", |(_, fields)| fields);
            let debug = is_debug(fields) || fields.split([',', '=']).any(is_debug) || fields.contains(":?}");
            ensure!(!debug, "{path}: {event}");
        }
    }
    ensure!(seen > 40, "only {seen} events were found");
    Ok(())
}
