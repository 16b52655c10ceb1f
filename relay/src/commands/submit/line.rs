//! One line of a file as a message, or all that keeps it from being one. Nothing that a line says is repeated, save the
//! name of a field that is none of a message's.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Value, error::Category};
use shared::{
    ids::{ConversationId, InvalidId, MessageId},
    submit::Message,
};

/// The fields of a line; the last one may be left out, or null.
const FIELDS: [&str; 3] = ["conversation_id", "content", "message_id"];

/// Why a line is no message.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unreadable {
    #[error("is longer than 8 MiB")]
    TooLong,
    #[error("is not UTF-8, from byte {0}")]
    NotUtf8(usize),
    #[error("is not JSON, from column {0}")]
    NotJson(usize),
    #[error("ends before its JSON does, at column {0}")]
    CutOff(usize),
    #[error(
        "is {0}, and must be an object of the texts conversation_id, content and, where wanted, message_id"
    )]
    NotAnObject(&'static str),
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Fields(Vec<Problem>),
}

/// What is wrong with one field.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Problem {
    #[error("{0} is missing")]
    Missing(&'static str),
    #[error("{field} must be a text, not {is}")]
    NoText { field: &'static str, is: &'static str },
    #[error("{0} is given twice")]
    Twice(&'static str),
    #[error("{0} is no field of a message, which has conversation_id, content and message_id")]
    Unknown(String),
    #[error(transparent)]
    Id(#[from] InvalidId),
}

/// Reads a line; a byte order mark may begin the first one, as some editors write it.
pub(super) fn parse(number: u64, line: &[u8]) -> Result<Message, Unreadable> {
    let text = str::from_utf8(line).map_err(|error| Unreadable::NotUtf8(error.valid_up_to() + 1))?;
    // A column is counted from the last line break, and this line has no other.
    let text = text.trim_end_matches(['\r', '\n']);
    let text = if number == 1 { text.trim_start_matches('\u{feff}') } else { text };
    let read: Line = serde_json::from_str(text).map_err(|error| match error.classify() {
        Category::Eof => Unreadable::CutOff(error.column()),
        Category::Syntax | Category::Io | Category::Data => Unreadable::NotJson(error.column()),
    })?;
    match read {
        Line::Other(is) => Err(Unreadable::NotAnObject(is)),
        Line::Object { values, problems } => message(values, problems).map_err(Unreadable::Fields),
    }
}

fn message(values: [Option<Value>; 3], mut problems: Vec<Problem>) -> Result<Message, Vec<Problem>> {
    let [conversation, content, message_id] = values;
    let mut text = |field: &'static str, value: Option<Value>| match value {
        Some(Value::String(text)) => Some(text),
        None => {
            problems.push(Problem::Missing(field));
            None
        }
        Some(other) => {
            problems.push(Problem::NoText { field, is: kind(&other) });
            None
        }
    };
    let conversation = text(FIELDS[0], conversation);
    let content = text(FIELDS[1], content);
    let message_id = match message_id {
        None | Some(Value::Null) => Some(MessageId::fresh().to_string()),
        given => text(FIELDS[2], given),
    };
    let conversation_id = conversation.map(ConversationId::new).transpose();
    let message_id = message_id.map(MessageId::new).transpose();
    match (conversation_id, message_id, content) {
        (Ok(Some(conversation_id)), Ok(Some(message_id)), Some(content)) if problems.is_empty() => {
            Ok(Message { conversation_id, message_id, content, trace_context: None })
        }
        (conversation_id, message_id, _) => {
            problems.extend([conversation_id.err(), message_id.err()].into_iter().flatten().map(Problem::Id));
            Err(problems)
        }
    }
}

const fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A line of JSON, whatever it is: what is wrong with its fields is no error of the parser, which stops at the first one.
enum Line {
    Object { values: [Option<Value>; 3], problems: Vec<Problem> },
    Other(&'static str),
}

impl<'de> Deserialize<'de> for Line {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Whatever)
    }
}

struct Whatever;

impl<'de> Visitor<'de> for Whatever {
    type Value = Line;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Line, A::Error> {
        let (mut values, mut problems) = ([const { None }; 3], Vec::new());
        let mut position = 0;
        while let Some(key) = map.next_key::<String>()? {
            position += 1;
            let Some(field) = FIELDS.iter().position(|field| *field == key) else {
                map.next_value::<IgnoredAny>()?;
                problems.push(Problem::Unknown(named(&key, position)));
                continue;
            };
            if values[field].replace(map.next_value::<Value>()?).is_some() {
                problems.push(Problem::Twice(FIELDS[field]));
            }
        }
        Ok(Line::Object { values, problems })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Line, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Line::Other("an array"))
    }

    fn visit_str<E>(self, _: &str) -> Result<Line, E> {
        Ok(Line::Other("a text"))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Line, E> {
        Ok(Line::Other("a boolean"))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Line, E> {
        Ok(Line::Other("a number"))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Line, E> {
        Ok(Line::Other("a number"))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Line, E> {
        Ok(Line::Other("a number"))
    }

    fn visit_unit<E>(self) -> Result<Line, E> {
        Ok(Line::Other("null"))
    }
}

/// A field by its name where that is a name, else by where it stands: it may be content that went astray.
fn named(key: &str, position: usize) -> String {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if (1..=40).contains(&key.len()) && key.bytes().all(is_name) {
        key.to_owned()
    } else {
        format!("field {position}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(line: &str) -> String {
        parse(2, line.as_bytes()).err().unwrap().to_string()
    }

    #[test]
    fn each_mistake_of_a_line_is_named_by_its_field() {
        let cases = [
            (r#"{"content":"secret"}"#, "conversation_id is missing"),
            (r#"{"conversation_id":"c"}"#, "content is missing"),
            (r#"{"conversation_id":"c","content":7}"#, "content must be a text, not a number"),
            (r#"{"conversation_id":"c","content":null}"#, "content must be a text, not null"),
            (
                r#"{"conversation_id":["secret"],"content":"x"}"#,
                "conversation_id must be a text, not an array",
            ),
            (
                r#"{"conversation_id":"c","content":"x","message_id":{"secret":1}}"#,
                "message_id must be a text, not an object",
            ),
            (r#"{"conversation_id":"c","content":"secret","content":"x"}"#, "content is given twice"),
            (
                r#"{"conversation_id":"c","content":"x","message-id":"secret"}"#,
                "message-id is no field of a message, which has conversation_id, content and message_id",
            ),
            (
                r#"{"conversation_id":"c","content":"x","the secret":1}"#,
                "field 3 is no field of a message, which has conversation_id, content and message_id",
            ),
            (r#"{"conversation_id":"","content":"x"}"#, "conversation_id must not be empty"),
            (
                r#"{"conversation_id":1,"message_id":""}"#,
                "conversation_id must be a text, not a number; content is missing; message_id must not be empty",
            ),
        ];
        for (line, named) in cases {
            assert_eq!(why(line), named, "{line}");
        }
    }

    #[test]
    fn a_line_that_is_no_object_says_what_it_is() {
        let cases = [
            ("[1,2]", "an array"),
            (r#""secret""#, "a text"),
            ("7", "a number"),
            ("-7", "a number"),
            ("0.5", "a number"),
            ("true", "a boolean"),
            ("null", "null"),
        ];
        for (line, is) in cases {
            assert!(
                why(line).starts_with(&format!("is {is}, and must be an object")),
                "{line}: {}",
                why(line)
            );
        }
    }

    #[test]
    fn broken_json_is_named_by_its_column_and_broken_text_by_its_byte() {
        assert_eq!(why("secret {"), "is not JSON, from column 1");
        assert_eq!(why(r#"{"conversation_id":"c"} {"#), "is not JSON, from column 25");
        for line_break in ["", "\n", "\r\n"] {
            let line = format!(r#"{{"conversation_id":"c","con{line_break}"#);
            assert_eq!(why(&line), "ends before its JSON does, at column 27", "{line_break:?}");
        }
        assert_eq!(parse(1, b"{\"a\":\"\xff\"}").err(), Some(Unreadable::NotUtf8(7)));
    }

    #[test]
    fn a_byte_order_mark_may_begin_a_file_and_no_other_line() {
        let line = "\u{feff}{\"conversation_id\":\"c\",\"content\":\"x\"}";
        assert_eq!(parse(1, line.as_bytes()).unwrap().content, "x");
        assert_eq!(why(line), "is not JSON, from column 1");
    }

    #[test]
    fn a_line_without_an_id_gets_a_fresh_one() {
        let line = br#"{"conversation_id":"c","content":"x"}"#;
        let id = || parse(1, line).map(|message| message.message_id).unwrap();
        assert_ne!(id(), id());
    }
}
