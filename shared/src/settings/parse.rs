//! The forms in which settings are written. Each parser answers with what would have been right.

use std::{fmt::Display, ops::RangeInclusive, path::PathBuf, str::FromStr, time::Duration};

use axum::http::Uri;
use bytesize::ByteSize;

use crate::ids::{AgentName, is_token_byte};

/// A number within `range`.
pub fn number<T: FromStr + PartialOrd + Display + Clone>(
    range: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |given| {
        given.parse().ok().filter(|number| range.contains(number)).ok_or_else(|| {
            format!("must be a number from {} to {}, not {given:?}", range.start(), range.end())
        })
    }
}

/// A duration with its unit, within `range`.
pub fn duration(range: RangeInclusive<Duration>) -> impl Fn(&str) -> Result<Duration, String> + Clone {
    move |given| {
        humantime::parse_duration(given).ok().filter(|duration| range.contains(duration)).ok_or_else(|| {
            let (from, to) =
                (humantime::format_duration(*range.start()), humantime::format_duration(*range.end()));
            format!("must be a duration such as 500ms, 10s or 5m, from {from} to {to}, not {given:?}")
        })
    }
}

/// A number of bytes, plain or with a unit, within `range`.
pub(super) fn bytes(range: RangeInclusive<u64>) -> impl Fn(&str) -> Result<u64, String> {
    move |given| {
        given.parse::<ByteSize>().ok().map(|size| size.0).filter(|bytes| range.contains(bytes)).ok_or_else(
            || {
                let (from, to) = (size(*range.start()), size(*range.end()));
                format!("must be a size such as 4096, 64KiB or 1GiB, from {from} to {to}, not {given:?}")
            },
        )
    }
}

/// A size as it may be given: `16MiB`.
fn size(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string().replace(".0 ", "").replace(' ', "")
}

/// One of the words in `options`.
pub(super) fn choice<T: Copy>(options: &[(&str, T)]) -> impl FnOnce(&str) -> Result<T, String> {
    move |given| {
        options.iter().find(|(word, _)| *word == given).map(|(_, choice)| *choice).ok_or_else(|| {
            let words: Vec<&str> = options.iter().map(|(word, _)| *word).collect();
            format!("must be {}, not {given:?}", words.join(" or "))
        })
    }
}

/// The name of an agent.
pub(super) fn agent(given: &str) -> Result<AgentName, String> {
    AgentName::new(given).map_err(|invalid| invalid.to_string())
}

/// The name of a process, as operators read it: up to 100 bytes and nothing that a terminal acts on.
pub(super) fn process_name(given: &str) -> Result<String, String> {
    if given.len() <= 100 && !given.chars().any(char::is_control) {
        Ok(given.to_owned())
    } else {
        Err("must be at most 100 bytes, without control characters".to_owned())
    }
}

/// A stream's name, as the server limits it.
pub(super) fn stream(given: &str) -> Result<String, String> {
    let refused = |c: char| c.is_whitespace() || c.is_control() || ".*>/\\".contains(c);
    if given.len() <= 255 && !given.contains(refused) {
        Ok(given.to_owned())
    } else {
        Err(format!("must be at most 255 bytes without whitespace and . * > / \\, not {given:?}"))
    }
}

/// The start of a subject: tokens joined by dots, so that nothing in it is a wildcard.
pub(super) fn subject_prefix(given: &str) -> Result<String, String> {
    if given.len() <= 100 && given.split('.').all(is_token) {
        Ok(given.to_owned())
    } else {
        Err(format!(
            "must be tokens of letters, digits, '_' and '-' joined by dots, 100 bytes at most, not {given:?}"
        ))
    }
}

/// A file that exists.
pub(super) fn file(given: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(given);
    if path.is_file() { Ok(path) } else { Err(format!("there is no file {given:?}")) }
}

/// An absolute `http` or `https` address. It may carry credentials, so the answer does not repeat it.
pub(super) fn http_url(given: &str) -> Result<String, String> {
    let is_http = |uri: &Uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some();
    if given.parse().ok().as_ref().is_some_and(is_http) {
        Ok(given.to_owned())
    } else {
        Err("must be an address such as http://127.0.0.1:8080/turns".to_owned())
    }
}

fn is_token(token: &str) -> bool {
    !token.is_empty() && token.bytes().all(is_token_byte)
}
