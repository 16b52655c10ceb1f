//! What goes over the broker: ids only, never content. A trigger says "run R is ready"; Postgres decides whether it is.

use async_nats::HeaderMap;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::ids::{AgentName, ConversationId, RunId, TurnId, is_token_byte};

/// The version of the trigger's body that this code writes and reads.
pub const VERSION: u8 = 1;
/// Partitions that conversations are spread over, as in NATS's own `partition(64, …)`.
pub const PARTITIONS: u32 = 64;
/// More than the longest body: a 200-byte id of escaped control characters, and the rest.
const MAX_BODY_BYTES: usize = 4096;

/// The body of a trigger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trigger {
    v: u8,
    /// The run that is ready.
    pub run_id: RunId,
    /// The turn it attempts.
    pub turn_id: TurnId,
    /// The conversation whose lane it holds.
    pub conversation_id: ConversationId,
    /// Which attempt it is, from 1.
    pub attempt: i32,
}

/// A message on the stream that is no trigger of ours. Says what is wrong, never what the message said.
#[derive(Debug, thiserror::Error)]
pub enum NotATrigger {
    /// Longer than any trigger.
    #[error("a body of {0} bytes is longer than any trigger")]
    TooLong(usize),
    /// No JSON of a trigger's form.
    #[error("not a trigger: line {}, column {}", .0.line(), .0.column())]
    Malformed(serde_json::Error),
    /// Written by a newer or foreign version.
    #[error("trigger version {0} is not {VERSION}")]
    Version(u8),
}

impl Trigger {
    /// The trigger of one run.
    #[must_use]
    pub fn new(run_id: RunId, turn_id: TurnId, conversation_id: ConversationId, attempt: i32) -> Self {
        Self { v: VERSION, run_id, turn_id, conversation_id, attempt }
    }

    /// The body to publish.
    pub fn encode(&self) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec(self)
    }

    /// Reads a body that anybody may have published.
    pub fn decode(body: &[u8]) -> Result<Self, NotATrigger> {
        if body.len() > MAX_BODY_BYTES {
            return Err(NotATrigger::TooLong(body.len()));
        }
        let trigger: Self = serde_json::from_slice(body).map_err(NotATrigger::Malformed)?;
        match trigger.v {
            VERSION => Ok(trigger),
            other => Err(NotATrigger::Version(other)),
        }
    }

    /// The headers to publish with. The id changes with each deliberate dispatch, so that the broker's dedupe window
    /// swallows a repeated publish but never a re-dispatch.
    #[must_use]
    pub fn headers(&self, stream: &str, dispatches: i32, trace_context: Option<&str>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(async_nats::header::NATS_MESSAGE_ID, format!("{}:{dispatches}", self.run_id));
        headers.insert(async_nats::header::NATS_EXPECTED_STREAM, stream);
        if let Some(traceparent) = trace_context.filter(|text| is_header_text(text)) {
            headers.insert("traceparent", traceparent);
        }
        headers
    }
}

/// A producer's text goes into a header only where it cannot end one.
fn is_header_text(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ')
}

/// The subjects of one deployment: `<prefix>.<agent>.<partition>.<key>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subjects {
    prefix: String,
}

impl Subjects {
    /// Subjects under a prefix of one or more tokens.
    #[must_use]
    pub fn new(prefix: impl Into<String>) -> Self {
        Self { prefix: prefix.into() }
    }

    /// Where the triggers of one conversation go.
    #[must_use]
    pub fn of(&self, agent: &AgentName, conversation: &ConversationId) -> String {
        format!("{}.{agent}.{}.{}", self.prefix, partition(conversation), key(conversation))
    }

    /// All triggers: what the stream takes.
    #[must_use]
    pub fn all(&self) -> String {
        format!("{}.>", self.prefix)
    }

    /// All triggers of one agent: what its durable consumer filters.
    #[must_use]
    pub fn of_agent(&self, agent: &AgentName) -> String {
        format!("{}.{agent}.>", self.prefix)
    }
}

/// FNV-1a-32 of the id, mod 64: the server's own `partition()`.
#[must_use]
pub fn partition(conversation: &ConversationId) -> u32 {
    let hash = conversation
        .as_str()
        .bytes()
        .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    hash % PARTITIONS
}

/// One subject token for any conversation id: the id where it is a short plain token, else `~` and half of its SHA-256.
fn key(conversation: &ConversationId) -> String {
    let id = conversation.as_str();
    if id.len() <= 64 && id.bytes().all(is_token_byte) {
        return id.to_owned();
    }
    let digest = Sha256::digest(id.as_bytes());
    digest[..16].iter().fold(String::from("~"), |key, byte| key + &format!("{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;

    fn subjects() -> Subjects {
        Subjects::new("agent.turns")
    }

    fn agent() -> AgentName {
        AgentName::new("default").unwrap()
    }

    /// Any id that a producer may send: 1 to 200 bytes of any Unicode but NUL.
    fn any_id() -> impl Strategy<Value = ConversationId> {
        prop::collection::vec(any::<char>(), 1..200)
            .prop_map(|chars| chars.into_iter().filter(|c| *c != '\0').collect::<String>())
            .prop_filter_map("length", |id| ConversationId::new(id).ok())
    }

    proptest! {
        #[test]
        fn any_id_gives_a_subject_of_exactly_three_plain_tokens(id in any_id()) {
            let subject = subjects().of(&agent(), &id);
            let tokens: Vec<_> = subject.strip_prefix("agent.turns.").unwrap().split('.').collect();
            prop_assert_eq!(tokens.len(), 3);
            for token in tokens {
                prop_assert!(!token.is_empty());
                prop_assert!(token.bytes().all(|b| is_token_byte(b) || b == b'~'));
            }
        }

        #[test]
        fn different_ids_give_different_subjects(a in any_id(), b in any_id()) {
            prop_assume!(a != b);
            prop_assert_ne!(subjects().of(&agent(), &a), subjects().of(&agent(), &b));
        }

        #[test]
        fn a_trigger_survives_the_wire(id in any_id(), run: u128, turn: u128, attempt in 1..100) {
            let trigger = Trigger::new(RunId(Uuid::from_u128(run)), TurnId(Uuid::from_u128(turn)), id, attempt);
            prop_assert_eq!(Trigger::decode(&trigger.encode().unwrap()).unwrap(), trigger);
        }

        #[test]
        fn no_bytes_make_decoding_panic(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
            let _ = Trigger::decode(&bytes);
        }
    }

    #[test]
    fn a_plain_id_is_its_own_key_and_never_looks_like_a_hashed_one() {
        let plain = ConversationId::new("user-42_a").unwrap();
        assert_eq!(
            subjects().of(&agent(), &plain),
            format!("agent.turns.default.{}.user-42_a", partition(&plain))
        );
        assert!(key(&ConversationId::new("a.b").unwrap()).starts_with('~'));
        assert!(key(&ConversationId::new("~abc").unwrap()).starts_with('~'));
        assert_ne!(key(&ConversationId::new("~abc").unwrap()), "~abc");
    }

    #[test]
    fn the_partition_is_the_servers_own() {
        // FNV-1a-32 test vectors: "" is excluded by the id's rule, "a" = e40c292c, "foobar" = bf9cf968.
        assert_eq!(partition(&ConversationId::new("a").unwrap()), 0xe40c_292c % 64);
        assert_eq!(partition(&ConversationId::new("foobar").unwrap()), 0xbf9c_f968 % 64);
    }

    #[test]
    fn foreign_bodies_are_refused_without_quoting_them() {
        for body in [&b""[..], b"{}", b"null", b"[1]", b"\xff\xfe", b"{\"v\":1}"] {
            assert!(Trigger::decode(body).is_err());
        }
        let secret = Trigger::decode(br#"{"v":1,"run_id":"swordfish"}"#).unwrap_err().to_string();
        assert!(!secret.contains("swordfish"), "{secret}");
        let mut newer =
            Trigger::new(RunId(Uuid::nil()), TurnId(Uuid::nil()), ConversationId::new("c").unwrap(), 1);
        newer.v = 2;
        assert!(matches!(Trigger::decode(&newer.encode().unwrap()), Err(NotATrigger::Version(2))));
    }

    #[test]
    fn a_trace_context_cannot_break_out_of_its_header() {
        let trigger =
            Trigger::new(RunId(Uuid::nil()), TurnId(Uuid::nil()), ConversationId::new("c").unwrap(), 1);
        assert!(trigger.headers("S", 1, Some("00-a-b-01\r\nX: y")).get("traceparent").is_none());
        assert!(trigger.headers("S", 1, Some("00-a-b-01")).get("traceparent").is_some());
    }
}
