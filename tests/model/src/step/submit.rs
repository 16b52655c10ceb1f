//! `submit_message` (`0006_submit.sql`), inside an application's transaction.
//!
//! Two steps: the transaction holds the conversation's lock from the call to its commit, and the lane's where it changes
//! it. What does not need the locks goes on meanwhile: a claim skips the lane, a begin takes one that was left alone.

use shared::state::LaneState;

use crate::{
    guard::Guard,
    protocol::Protocol,
    scenario::Chance,
    state::{Lane, Row, Said, State, Submit},
};

impl Protocol {
    /// Takes `conversations … for no key update`; message and row are written, unseen. The lane's `update … where`
    /// decides here, under its lock, whether the lane is changed.
    pub(crate) fn submit_opens(&self, state: &mut State, conversation: u8) {
        let it = &mut state.conversations[usize::from(conversation)];
        let Some(message) = it.messages.iter().position(|message| message.said == Said::NotYet) else {
            return;
        };
        let holds_lane = self.submit_takes(&it.lane);
        it.submit = Some(Submit { message: u8::try_from(message).unwrap_or(u8::MAX), holds_lane });
    }

    fn submit_takes(&self, lane: &Lane) -> bool {
        match lane.state {
            LaneState::Queued | LaneState::Running => !self.has(Guard::SubmitSparesFlight),
            LaneState::Waiting if lane.turn.is_some() => !self.has(Guard::SubmitSparesRetry),
            LaneState::Idle | LaneState::Waiting => true,
        }
    }

    pub(crate) fn submit_commits(state: &mut State, conversation: u8) {
        let it = &mut state.conversations[usize::from(conversation)];
        let Some(Submit { message, holds_lane }) = it.submit.take() else { return };
        let message = &mut it.messages[usize::from(message)];
        message.said = Said::Visible;
        message.row = Some(Row::FREE);
        if holds_lane {
            it.lane = Lane { state: LaneState::Waiting, ..Lane::IDLE };
        }
    }

    pub(crate) fn submit_rolls_back(state: &mut State, conversation: u8) {
        state.conversations[usize::from(conversation)].submit = None;
        state.budget.spend(Chance::Rollback);
    }
}
