//! Lines for people: aligned, with ages in words, and with nothing that a terminal would act on.

use std::{
    io::{self, Write},
    time::Duration,
};

use serde::Serialize;

/// One JSON value on a line of its own.
pub(super) fn json(out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    out.write_all(b"\n")
}

/// Rows under a head, each column as wide as its widest cell. The last column is not padded.
pub(super) fn table<const N: usize>(
    out: &mut dyn Write,
    head: [&str; N],
    rows: &[[String; N]],
) -> io::Result<()> {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].as_str());
        cells.chain([head[column]]).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let head = head.map(str::to_owned);
    for row in [&head].into_iter().chain(rows) {
        let padded: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        writeln!(out, "{}", padded.join("  ").trim_end())?;
    }
    Ok(())
}

/// A text of somebody else on one line: control and bidirectional characters escaped, at most `max` characters shown.
pub(super) fn shown(text: &str, max: usize) -> String {
    let mut line = String::new();
    for (position, char) in text.chars().enumerate() {
        if position == max {
            line.push('…');
            break;
        }
        match char {
            '\n' | '\r' | '\t' => line.extend(char.escape_default()),
            _ if char.is_control() || is_bidirectional(char) => line.extend(char.escape_unicode()),
            _ => line.push(char),
        }
    }
    line
}

/// Marks that reorder what a terminal shows, so that one text could pose as another.
fn is_bidirectional(char: char) -> bool {
    matches!(char, '\u{061c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Seconds as Postgres counts them, in words of the two largest units; below a minute, with milliseconds.
pub(super) fn age(seconds: f64) -> String {
    let age = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default();
    let rounded = if age.as_secs() < 60 {
        Duration::from_millis(u64::try_from(age.as_millis()).unwrap_or(u64::MAX))
    } else {
        Duration::from_secs(age.as_secs())
    };
    let words = humantime::format_duration(rounded).to_string();
    words.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_cannot_steer_the_terminal() {
        assert_eq!(shown("red \u{1b}[31m\r\nnow \u{202e}txt", 100), "red \\u{1b}[31m\\r\\nnow \\u{202e}txt");
        assert_eq!(shown("añb", 2), "añ…");
    }

    #[test]
    fn ages_name_their_two_largest_units() {
        assert_eq!(age(0.0124), "12ms");
        assert_eq!(age(3.25), "3s 250ms");
        assert_eq!(age(93_784.9), "1day 2h");
        assert_eq!(age(-1.0), "0s");
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut out = Vec::new();
        table(&mut out, ["name", "n"], &[["a".into(), "12".into()], ["longer".into(), String::new()]])
            .unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "name    n\na       12\nlonger\n");
    }
}
