//! What several transactions do to a conversation's tables in the same words.

use shared::state::{LaneState, OperationStatus, RowStatus, RunOutcome};

use crate::{
    state::{Answer, Conversation, Lane, Message, Messages, Outcome, Row, Run, RunId, Said, TurnId},
    witness::{Note, Witness},
};

impl Conversation {
    pub(crate) fn new(messages: usize) -> Self {
        Self {
            exists: true,
            submit: None,
            departing: false,
            messages: vec![Message { said: Said::NotYet, row: None }; messages],
            lane: Lane::IDLE,
            runs: Vec::new(),
            outcomes: Vec::new(),
            unread: 0,
            read: 0,
            witness: Witness::default(),
        }
    }

    /// Whoever locks the conversation need not wait.
    pub(crate) const fn is_free(&self) -> bool {
        self.submit.is_none() && !self.departing
    }

    pub(crate) fn rows(&self) -> impl Iterator<Item = (usize, &Row)> {
        self.messages.iter().enumerate().filter_map(|(place, message)| Some((place, message.row.as_ref()?)))
    }

    pub(crate) fn rows_mut(&mut self) -> impl Iterator<Item = &mut Row> {
        self.messages.iter_mut().filter_map(|message| message.row.as_mut())
    }

    pub(crate) fn has_free_rows(&self) -> bool {
        self.rows().any(|(_, row)| row.is_free())
    }

    /// The operations of a turn, whichever of its runs made them.
    pub(crate) fn operations_of(&self, turn: TurnId) -> impl Iterator<Item = OperationStatus> {
        self.runs.iter().filter(move |run| run.turn == turn).filter_map(|run| run.operation)
    }

    /// May a tool call of the turn have changed the world? Anything but a known failure counts.
    pub(crate) fn has_side_effect(&self, turn: TurnId) -> bool {
        self.operations_of(turn).any(|status| status != OperationStatus::Failed)
    }

    /// `insert into agent_runs`, of the run that holds the lane.
    pub(crate) fn record_end(&mut self, outcome: RunOutcome) {
        if let Some(number) = self.lane.run {
            let run = &mut self.runs[usize::from(number)];
            self.witness.note(Note::SecondEnd, run.ended.is_some());
            run.ended = Some(outcome);
        }
    }

    /// An outcome's message, and with it `unread_count + 1`.
    pub(crate) fn say(&mut self, turn: TurnId, run: Option<u8>, said: Answer) {
        self.outcomes.push(Outcome { turn, run, said });
        self.unread += 1;
    }

    /// `update operations set message_id`: the newest outcome shows them.
    pub(crate) fn show_operations(&mut self, of: impl Fn(usize) -> bool) {
        let newest = u8::try_from(self.outcomes.len() - 1).unwrap_or(u8::MAX);
        for (number, run) in self.runs.iter_mut().enumerate() {
            if of(number) && run.operation.is_some() && run.shown.is_none() {
                run.shown = Some(newest);
            }
        }
    }

    /// What a lane does when its turn is over: it waits where rows are free, else it is idle.
    pub(crate) fn free_lane(&mut self) {
        self.leave_lane(self.has_free_rows());
    }

    pub(crate) fn leave_lane(&mut self, waits: bool) {
        self.lane = if waits { Lane { state: LaneState::Waiting, ..Lane::IDLE } } else { Lane::IDLE };
    }
}

impl Lane {
    pub(crate) const IDLE: Self = Self {
        state: LaneState::Idle,
        turn: None,
        run: None,
        attempt: 0,
        dispatches: 0,
        lease_is_over: false,
        cancel_requested: false,
    };

    pub(crate) fn is(&self, state: LaneState, run: RunId) -> bool {
        self.state == state && self.run == Some(run.number)
    }

    pub(crate) fn runs(&self, run: RunId) -> bool {
        self.is(LaneState::Running, run)
    }

    pub(crate) fn waits_for_messages(&self) -> bool {
        self.state == LaneState::Waiting && self.turn.is_none()
    }

    /// The same turn again, after an attempt that is over.
    pub(crate) const fn waiting_again(self) -> Self {
        Self { state: LaneState::Waiting, turn: self.turn, attempt: self.attempt, ..Self::IDLE }
    }
}

impl Row {
    pub(crate) const FREE: Self =
        Self { status: RowStatus::Pending, turn: None, run: None, generation: 1, attempts: 0 };

    /// Pending, and in no turn.
    pub(crate) fn free(&mut self) {
        *self = Self { generation: self.generation, ..Self::FREE };
    }

    pub(crate) fn is_free(self) -> bool {
        self.status == RowStatus::Pending && self.turn.is_none()
    }

    pub(crate) const fn is_open(self) -> bool {
        matches!(self.status, RowStatus::Pending | RowStatus::Processing)
    }

    pub(crate) fn is_in_progress_for(self, lane: &Lane) -> bool {
        self.status == RowStatus::Processing && self.turn == lane.turn && self.run == lane.run
    }
}

impl Run {
    pub(crate) const fn claimed(turn: TurnId, attempt: u8, took: Messages) -> Self {
        Self { turn, attempt, took, ended: None, operation: None, shown: None, starts: 0, effects: 0 }
    }
}
