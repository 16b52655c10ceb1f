//! The lines of a file as messages, read on a thread of their own and only a few ahead of those that take them.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read as _},
    path::Path,
    thread,
};

use shared::submit::Message;
use tokio::sync::mpsc;

use super::line::{self, Unreadable};

/// The longest line: the largest content, with every byte of it escaped.
const MAX_LINE_BYTES: usize = 8 << 20;
/// Lines read ahead.
const AHEAD: usize = 16;

/// What a line turned out to be.
pub(super) enum Line {
    Message {
        number: u64,
        message: Message,
    },
    Unreadable {
        number: u64,
        why: Unreadable,
    },
    /// The input broke: there are no more lines.
    Broken(io::Error),
}

/// An open input and its length in bytes, where it has one.
pub(super) struct Input {
    reader: Box<dyn BufRead + Send>,
    pub(super) bytes: Option<u64>,
}

/// Opens a file, or for `-` standard input.
pub(super) fn open(path: &Path) -> io::Result<Input> {
    if path == Path::new("-") {
        return Ok(Input { reader: Box::new(BufReader::new(io::stdin())), bytes: None });
    }
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    let bytes = metadata.is_file().then_some(metadata.len());
    Ok(Input { reader: Box::new(BufReader::with_capacity(1 << 16, file)), bytes })
}

/// Reads lines until the end, or until nobody takes them any more. Each comes with the bytes read so far.
///
/// The thread is not waited for: one that waits for a terminal's next line must not keep the process.
pub(super) fn read(mut input: Input) -> mpsc::Receiver<(u64, Line)> {
    let (sender, receiver) = mpsc::channel(AHEAD);
    thread::spawn(move || {
        let (mut buffer, mut offset) = (Vec::new(), 0);
        for number in 1.. {
            let line = match next(&mut *input.reader, &mut buffer) {
                Ok(Next::End) => return,
                Ok(Next::Line(bytes)) => {
                    offset += bytes;
                    if buffer.trim_ascii().is_empty() {
                        continue;
                    }
                    match line::parse(number, &buffer) {
                        Ok(message) => Line::Message { number, message },
                        Err(why) => Line::Unreadable { number, why },
                    }
                }
                Ok(Next::TooLong(bytes)) => {
                    offset += bytes;
                    Line::Unreadable { number, why: Unreadable::TooLong }
                }
                Err(error) => Line::Broken(error),
            };
            let broken = matches!(line, Line::Broken(_));
            if sender.blocking_send((offset, line)).is_err() || broken {
                return;
            }
        }
    });
    receiver
}

enum Next {
    End,
    Line(u64),
    TooLong(u64),
}

/// Reads a line into `buffer`, and past one that is too long.
fn next(input: &mut dyn BufRead, buffer: &mut Vec<u8>) -> io::Result<Next> {
    buffer.clear();
    let limit = MAX_LINE_BYTES as u64 + 1;
    let read = input.take(limit).read_until(b'\n', buffer)? as u64;
    if read == 0 {
        return Ok(Next::End);
    }
    if read < limit || buffer.ends_with(b"\n") {
        return Ok(Next::Line(read));
    }
    Ok(Next::TooLong(read + input.skip_until(b'\n')? as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_of(text: &'static [u8]) -> Vec<(u64, Result<String, String>)> {
        let input = Input { reader: Box::new(text), bytes: None };
        let mut receiver = read(input);
        std::iter::from_fn(|| receiver.blocking_recv())
            .map(|(_, line)| match line {
                Line::Message { number, message } => (number, Ok(message.content)),
                Line::Unreadable { number, why } => (number, Err(why.to_string())),
                Line::Broken(error) => panic!("{error}"),
            })
            .collect()
    }

    #[test]
    fn a_line_that_cannot_be_read_leaves_the_others_alone_and_is_not_repeated() {
        let lines = lines_of(
            b"{\"conversation_id\":\"c\",\"content\":\"one\"}\n\
              secret {\n\
              \n\
              {\"conversation_id\":\"c\",\"content\":{\"secret\":1}}\n\
              {\"conversation_id\":\"\",\"content\":\"secret\"}\n\
              {\"conversation_id\":\"c\",\"content\":\"two\",\"a secret\":1}\n\
              \xff\n\
              {\"conversation_id\":\"c\",\"message_id\":null,\"content\":\"three\"}",
        );
        assert_eq!(lines.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [1, 2, 4, 5, 6, 7, 8]);
        assert_eq!((&lines[0].1, &lines[6].1), (&Ok("one".to_owned()), &Ok("three".to_owned())));
        for (number, line) in &lines[1..6] {
            let why = line.as_ref().unwrap_err();
            assert!(!why.contains("secret"), "{number}: {why}");
        }
        assert_eq!(lines[3].1, Err("conversation_id must not be empty".to_owned()));
    }

    #[test]
    fn an_endless_line_is_passed_over_in_bounded_memory() {
        let endless = io::repeat(b'a')
            .take(64 << 20)
            .chain("\n{\"conversation_id\":\"c\",\"content\":\"after\"}".as_bytes());
        let mut input = BufReader::new(endless);
        let mut buffer = Vec::new();
        assert!(
            matches!(next(&mut input, &mut buffer).unwrap(), Next::TooLong(bytes) if bytes == (64 << 20) + 1)
        );
        assert!(buffer.capacity() <= 2 * MAX_LINE_BYTES + 2);
        assert!(matches!(next(&mut input, &mut buffer).unwrap(), Next::Line(_)));
        assert_eq!(line::parse(1, &buffer).unwrap().content, "after");
    }
}
