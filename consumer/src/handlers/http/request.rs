//! What an agent is told about a turn: version 1 of the protocol.

use serde::{Serialize, Serializer};
use shared::{
    ids::{AgentName, ConversationId, MessageId, RunId, TurnId},
    state::Role,
};

use crate::{
    handler::{Turn, TurnMessage},
    operations_api::Registered,
};

const PROTOCOL: u32 = 1;

/// The body of the request.
#[derive(Serialize)]
pub(super) struct Request<'a> {
    protocol: u32,
    turn_id: TurnId,
    run_id: RunId,
    attempt: i32,
    conversation_id: &'a ConversationId,
    agent: &'a AgentName,
    messages: Messages<'a>,
    operations_url: &'a str,
    operations_token: &'a str,
}

struct Messages<'a>(&'a [TurnMessage]);

#[derive(Serialize)]
struct Message<'a> {
    id: &'a MessageId,
    seq: i64,
    role: Role,
    content: &'a str,
    in_turn: bool,
}

impl<'a> Request<'a> {
    pub(super) fn new(turn: &'a Turn, registered: &'a Registered) -> Self {
        Self {
            protocol: PROTOCOL,
            turn_id: turn.turn_id,
            run_id: turn.run_id,
            attempt: turn.attempt,
            conversation_id: &turn.conversation_id,
            agent: &turn.agent,
            messages: Messages(&turn.messages),
            operations_url: &registered.url,
            operations_token: registered.token.reveal(),
        }
    }
}

impl Serialize for Messages<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(|TurnMessage { id, seq, role, content, in_turn }| Message {
            id,
            seq: *seq,
            role: *role,
            content,
            in_turn: *in_turn,
        }))
    }
}
