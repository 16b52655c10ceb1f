//! What there is: the tables, what each process has in its memory, and what the broker holds.
//!
//! Everything that Postgres keeps of one conversation is a [`Conversation`]; only a transaction changes it. The rest
//! is lost with its process. What no table has and a promise needs stands in [`Witness`],
//! and in `took`, `starts` and `effects` of a [`Run`].

use shared::state::{LaneState, OperationStatus, RowStatus, RunOutcome};

use crate::{
    scenario::{Budget, Scenario, Source},
    witness::Witness,
};

/// The whole system at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct State {
    pub(crate) conversations: Vec<Conversation>,
    /// Consumers are alike: they stand in a canonical order, so that states which differ in names alone are one.
    pub(crate) consumers: Vec<Consumer>,
    pub(crate) relay: Relay,
    pub(crate) broker: Broker,
    /// The faults and the wishes that are still to come.
    pub(crate) budget: Budget,
}

/// A run, wherever it is spoken of: its conversation, and its number in the order of that conversation's claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RunId {
    pub(crate) conversation: u8,
    pub(crate) number: u8,
}

/// One JetStream message: which run is ready, and which dispatch of it this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Trigger {
    pub(crate) run: RunId,
    pub(crate) dispatch: u8,
}

/// A set of messages, by place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Messages(u8);

/// A turn is known by what it is made of, as its UUIDv5 is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TurnId {
    pub(crate) generation: u8,
    pub(crate) messages: Messages,
}

/// What Postgres holds of one conversation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Conversation {
    pub(crate) exists: bool,
    /// An application's transaction that has submitted and not yet committed. It holds the conversation's lock.
    pub(crate) submit: Option<Submit>,
    /// Only without the lane's lock: a deletion that has deleted the operations and nothing else yet.
    pub(crate) departing: bool,
    pub(crate) messages: Vec<Message>,
    pub(crate) lane: Lane,
    /// Every run that was claimed; those with an end stand in `agent_runs`.
    pub(crate) runs: Vec<Run>,
    /// Replies and errors, by `seq`.
    pub(crate) outcomes: Vec<Outcome>,
    pub(crate) unread: u8,
    /// How many outcomes lie at or below `last_read_seq`.
    pub(crate) read: u8,
    pub(crate) witness: Witness,
}

/// An open submit: its message and row are written, and nobody else sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Submit {
    pub(crate) message: u8,
    /// The lane was idle or waiting for messages: it is changed, and so locked until the commit.
    pub(crate) holds_lane: bool,
}

/// A user's message and its outbox row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Message {
    pub(crate) said: Said,
    pub(crate) row: Option<Row>,
}

/// How a user's message stands, whatever becomes of its row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Said {
    NotYet,
    Visible,
    /// `delete_message` left a tombstone.
    Tombstone,
    /// A plain `delete from messages` took it and its row, past every function.
    Erased,
}

/// `agent_outbox`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Row {
    pub(crate) status: RowStatus,
    pub(crate) turn: Option<TurnId>,
    pub(crate) run: Option<u8>,
    pub(crate) generation: u8,
    pub(crate) attempts: u8,
}

/// `agent_lanes`. Of `wake_at` only one thing matters: whether a lease is over. Everything else may be due at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Lane {
    pub(crate) state: LaneState,
    pub(crate) turn: Option<TurnId>,
    pub(crate) run: Option<u8>,
    pub(crate) attempt: u8,
    pub(crate) dispatches: u8,
    pub(crate) lease_is_over: bool,
    pub(crate) cancel_requested: bool,
}

/// What is known of a run, while it holds its lane and after.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Run {
    pub(crate) turn: TurnId,
    pub(crate) attempt: u8,
    /// The rows that its claim took.
    pub(crate) took: Messages,
    /// `agent_runs.outcome`.
    pub(crate) ended: Option<RunOutcome>,
    /// The run's side effect in `operations`; a handler makes one call at most.
    pub(crate) operation: Option<OperationStatus>,
    /// `operations.message_id`, as a place in `outcomes`.
    pub(crate) shown: Option<u8>,
    /// How often a handler was started for it.
    pub(crate) starts: u8,
    /// How often the world was changed for it.
    pub(crate) effects: u8,
}

/// What the user sees of a finished turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Outcome {
    pub(crate) turn: TurnId,
    pub(crate) run: Option<u8>,
    pub(crate) said: Answer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Answer {
    Reply,
    Error,
    Cancelled,
}

/// What the relays have in memory. Several are as one: each piece of work is a task of its own.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Relay {
    /// Claimed, or to be dispatched again: on its way to the broker.
    pub(crate) publishing: Vec<Trigger>,
    /// Not acknowledged: to be given back.
    pub(crate) unanswered: Vec<Trigger>,
    /// A queued lane, as read, whose trigger the broker does not hold.
    pub(crate) missing: Option<Trigger>,
    /// A run that was found to be lost, by a relay or by a consumer.
    pub(crate) lost: Option<(RunId, Lost)>,
    /// A lane that was found to be due by a claim that does not lock it.
    pub(crate) due: Option<u8>,
}

/// Why a run counts as lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Lost {
    /// Its lease is over.
    Expired,
    /// Its consumer has started anew.
    LeftBehind,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Broker {
    /// The stream, in the order of arrival. A message stays until it is acknowledged, and may be delivered any number of
    /// times until then.
    pub(crate) stored: Vec<Trigger>,
    /// Published, timed out, and still on their way.
    pub(crate) late: Vec<Trigger>,
    /// The ids in the dedupe window.
    pub(crate) seen: Vec<Trigger>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Consumer {
    pub(crate) source: Source,
    pub(crate) doing: Doing,
}

/// One slot of a consumer, from the delivery to the end of its run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Doing {
    Nothing,
    /// A trigger was delivered.
    Received(Trigger),
    /// A queued lane was found overdue by a consumer without a broker.
    Found(RunId),
    /// The handler runs, whether its run still holds the lane or not.
    Handling(RunId, Hand),
    /// The commit of a reply was sent, and its answer was lost.
    Unsure(RunId),
    /// The lane refused the reply; the run is given back.
    Fenced(RunId),
}

/// How far a handler got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Hand {
    Thinking,
    /// The operation is recorded: the tool may be called.
    Calling,
    /// The tool changed the world.
    Acted,
    /// The tool refused, and is known to have done nothing.
    Refused,
    /// The operation's end is recorded.
    Ready,
    /// Only without the operation's lock: the lane was found to be its own, and nothing is recorded yet.
    Checked,
    /// Only with a finish that decides on an old snapshot: whether it saw free rows.
    Looked {
        free_rows: bool,
    },
}

impl Messages {
    pub(crate) const fn with(self, message: usize) -> Self {
        Self(self.0 | 1 << message)
    }

    pub(crate) const fn has(self, message: usize) -> bool {
        self.0 & 1 << message != 0
    }

    pub(crate) const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl FromIterator<usize> for Messages {
    fn from_iter<I: IntoIterator<Item = usize>>(messages: I) -> Self {
        messages.into_iter().fold(Self::default(), Self::with)
    }
}

impl State {
    /// Conversations without messages, idle processes, an empty stream.
    pub(crate) fn initial(scenario: &Scenario) -> Self {
        Self {
            conversations: vec![Conversation::new(scenario.messages); scenario.conversations],
            consumers: scenario
                .sources
                .iter()
                .map(|source| Consumer { source: *source, doing: Doing::Nothing })
                .collect(),
            relay: Relay::default(),
            broker: Broker::default(),
            budget: scenario.budget,
        }
    }

    /// States that differ only in what no step can tell apart become one: which consumer is which, and the message ids of
    /// runs that are over, which are not dispatched again.
    pub(crate) fn forget_names(&mut self) {
        self.consumers.sort_unstable();
        let conversations = &self.conversations;
        self.broker
            .seen
            .retain(|id| conversations[usize::from(id.run.conversation)].lane.is(LaneState::Queued, id.run));
    }

    pub(crate) fn of(&mut self, run: RunId) -> &mut Conversation {
        &mut self.conversations[usize::from(run.conversation)]
    }

    /// Does this run hold its lane?
    pub(crate) fn holds(&self, run: RunId) -> bool {
        self.conversations[usize::from(run.conversation)].lane.runs(run)
    }
}
