//! Ids as types, so that a turn can never be passed where a run is meant. This is the only place that makes ids.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

mod token;

pub use token::OperationsToken;

/// The longest conversation or message id, in bytes.
pub const MAX_TEXT_ID_BYTES: usize = 200;

/// The namespace of turn ids: a UUID of this project's own.
const TURNS: Uuid = Uuid::from_u128(0x5f2b_8d0e_9c4a_4e61_8a57_3f1c_d2b6_7e90);
/// The namespace of idempotency keys: a UUID of this project's own.
const CALLS: Uuid = Uuid::from_u128(0x0d6c_71f4_2b9e_4c38_b5aa_61e8_07f3_94cd);

/// A text that cannot be an id. Names the field and the rule; never the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidId {
    /// No bytes at all.
    #[error("{0} must not be empty")]
    Empty(&'static str),
    /// Over 200 bytes, or over 64 for an agent.
    #[error("{0} must have at most {1} bytes")]
    TooLong(&'static str, usize),
    /// Postgres keeps no NUL in a text.
    #[error("{0} must not contain NUL")]
    Nul(&'static str),
    /// An agent's name is one token of a subject.
    #[error("{0} may have only A-Z, a-z, 0-9, _ and -")]
    NotAToken(&'static str),
}

fn text_id(field: &'static str, id: &str) -> Result<(), InvalidId> {
    match id {
        "" => Err(InvalidId::Empty(field)),
        id if id.len() > MAX_TEXT_ID_BYTES => Err(InvalidId::TooLong(field, MAX_TEXT_ID_BYTES)),
        id if id.contains('\0') => Err(InvalidId::Nul(field)),
        _ => Ok(()),
    }
}

fn token(field: &'static str, name: &str) -> Result<(), InvalidId> {
    match name {
        "" => Err(InvalidId::Empty(field)),
        name if name.len() > 64 => Err(InvalidId::TooLong(field, 64)),
        name if !name.bytes().all(is_token_byte) => Err(InvalidId::NotAToken(field)),
        _ => Ok(()),
    }
}

/// True for the bytes that are safe in one token of a NATS subject: `[A-Za-z0-9_-]`.
#[must_use]
pub const fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-')
}

macro_rules! text_ids {
    ($($(#[$doc:meta])* $name:ident: $check:ident($field:literal);)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, sqlx::Type)]
        #[serde(try_from = "String")]
        #[sqlx(transparent)]
        pub struct $name(String);

        impl $name {
            /// Takes a text that keeps this id's rule.
            pub fn new(id: impl Into<String>) -> Result<Self, InvalidId> {
                let id = id.into();
                $check($field, &id)?;
                Ok(Self(id))
            }

            /// The text itself.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(id: String) -> Result<Self, InvalidId> {
                Self::new(id)
            }
        }

        impl std::str::FromStr for $name {
            type Err = InvalidId;
            fn from_str(id: &str) -> Result<Self, InvalidId> {
                Self::new(id)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}

text_ids! {
    /// A conversation, named by the application: any text of 1 to 200 bytes.
    ConversationId: text_id("conversation_id");
    /// A message: a user's is named by its client, an outcome's is fresh and random.
    MessageId: text_id("message_id");
    /// An agent: one token of a subject, `[A-Za-z0-9_-]{1,64}`.
    AgentName: token("agent");
}

impl Default for AgentName {
    /// The agent that the schema makes: `default`.
    fn default() -> Self {
        Self("default".into())
    }
}

impl MessageId {
    /// A fresh, random id.
    #[must_use]
    pub fn fresh() -> Self {
        Self(random().to_string())
    }
}

macro_rules! uuid_ids {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, sqlx::Type,
        )]
        #[serde(transparent)]
        #[sqlx(transparent)]
        pub struct $name(pub Uuid);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl std::str::FromStr for $name {
            type Err = uuid::Error;
            fn from_str(id: &str) -> Result<Self, uuid::Error> {
                id.parse().map(Self)
            }
        }
    )*};
}

uuid_ids! {
    /// An immutable set of outbox rows that are answered together.
    TurnId;
    /// One attempt at a turn, and the fence of every write that the attempt makes.
    RunId;
    /// One tool call of a run.
    OperationId;
    /// What a tool is given so that it can tell a repeated call: equal across the attempts of a turn.
    IdempotencyKey;
}

impl TurnId {
    /// Derives the id of a turn from what it is made of: a `UUIDv5` over an injective encoding (every text by its length
    /// first) of the conversation, the generation and the messages with their seqs, in order.
    pub fn derive<'a>(
        conversation: &ConversationId,
        generation: i32,
        messages: impl IntoIterator<Item = (&'a MessageId, i64)>,
    ) -> Self {
        let mut name = Vec::with_capacity(256);
        push_text(&mut name, conversation.as_str());
        name.extend(generation.to_be_bytes());
        for (message, seq) in messages {
            push_text(&mut name, message.as_str());
            name.extend(seq.to_be_bytes());
        }
        Self(Uuid::new_v5(&TURNS, &name))
    }
}

impl RunId {
    /// A fresh id: `UUIDv7`, so that runs of about the same time lie near each other in the index.
    #[must_use]
    #[expect(
        clippy::disallowed_methods,
        reason = "made here only; the time in it orders nothing but an index"
    )]
    pub fn fresh() -> Self {
        Self(Uuid::now_v7())
    }
}

impl OperationId {
    /// A fresh, random id.
    #[must_use]
    pub fn fresh() -> Self {
        Self(random())
    }
}

impl IdempotencyKey {
    /// Derives the key of the `nth` call (from 1) that `turn` makes of `tool` with this canonical input.
    #[must_use]
    pub fn derive(turn: TurnId, tool: &str, canonical_input: &str, nth: u32) -> Self {
        let mut name = turn.0.as_bytes().to_vec();
        push_text(&mut name, tool);
        push_text(&mut name, canonical_input);
        name.extend(nth.to_be_bytes());
        Self(Uuid::new_v5(&CALLS, &name))
    }
}

fn push_text(name: &mut Vec<u8>, text: &str) {
    name.extend((text.len() as u64).to_be_bytes());
    name.extend(text.as_bytes());
}

#[expect(clippy::disallowed_methods, reason = "made here only")]
fn random() -> Uuid {
    Uuid::new_v4()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conversation(id: &str) -> ConversationId {
        ConversationId::new(id).unwrap()
    }

    fn message(id: &str) -> MessageId {
        MessageId::new(id).unwrap()
    }

    #[test]
    fn text_ids_take_any_unicode_of_1_to_200_bytes() {
        for id in ["a", " ", "a.b", "*", ">", "\n", "🦀", &"x".repeat(200)] {
            assert!(ConversationId::new(id).is_ok(), "{id:?}");
        }
        assert_eq!(ConversationId::new(""), Err(InvalidId::Empty("conversation_id")));
        assert_eq!(MessageId::new("x".repeat(201)), Err(InvalidId::TooLong("message_id", 200)));
        assert_eq!(MessageId::new("a\0b"), Err(InvalidId::Nul("message_id")));
    }

    #[test]
    fn an_agent_is_one_token() {
        assert!(AgentName::new("Support_2-eu").is_ok());
        for name in ["", "a.b", "*", ">", "a b", "é", &"x".repeat(65)] {
            assert!(AgentName::new(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn a_turn_id_depends_on_every_part_and_on_nothing_else() {
        let (a, b) = (message("a"), message("b"));
        let id = TurnId::derive(&conversation("c"), 1, [(&a, 1), (&b, 2)]);
        assert_eq!(id, TurnId::derive(&conversation("c"), 1, [(&a, 1), (&b, 2)]));
        assert_ne!(id, TurnId::derive(&conversation("d"), 1, [(&a, 1), (&b, 2)]));
        assert_ne!(id, TurnId::derive(&conversation("c"), 2, [(&a, 1), (&b, 2)]));
        assert_ne!(id, TurnId::derive(&conversation("c"), 1, [(&a, 1), (&b, 3)]));
        assert_ne!(id, TurnId::derive(&conversation("c"), 1, [(&b, 2), (&a, 1)]));
        assert_ne!(id, TurnId::derive(&conversation("c"), 1, [(&a, 1)]));
    }

    #[test]
    fn the_encoding_of_a_turn_is_injective_where_texts_could_run_together() {
        let (a, bc, ab, c) = (message("a"), message("bc"), message("ab"), message("c"));
        assert_ne!(
            TurnId::derive(&conversation("x"), 1, [(&a, 1), (&bc, 2)]),
            TurnId::derive(&conversation("x"), 1, [(&ab, 1), (&c, 2)]),
        );
    }

    #[test]
    fn an_idempotency_key_is_equal_for_the_same_call_and_new_for_the_next() {
        let turn = TurnId(Uuid::nil());
        let key = IdempotencyKey::derive(turn, "mail", "{}", 1);
        assert_eq!(key, IdempotencyKey::derive(turn, "mail", "{}", 1));
        assert_ne!(key, IdempotencyKey::derive(turn, "mail", "{}", 2));
        assert_ne!(key, IdempotencyKey::derive(turn, "mai", "l{}", 1));
    }
}
