//! What each action does. One function a transition, named as in the code; what is in one function commits together.

use crate::{
    actions::{Action, Look, Move, Resume, Wish, Work},
    protocol::Protocol,
    state::{Doing, RunId, State, Trigger},
};

mod begin;
mod broker;
mod claim;
mod finish;
mod operation;
mod publish;
mod settle;
mod submit;
mod user;

impl Protocol {
    pub(crate) fn step(&self, state: &mut State, action: Action) {
        match action {
            Action::Application(conversation, wish) => self.grant(state, conversation, wish),
            Action::Lane(conversation, look) => self.look(state, conversation, look),
            Action::Relay(resume) => self.resume(state, resume),
            Action::Trigger(trigger, way) => self.transport(state, trigger, way),
            Action::Consumer(consumer, work) => self.work(state, consumer, work),
        }
    }

    fn grant(&self, state: &mut State, conversation: u8, wish: Wish) {
        match wish {
            Wish::SubmitOpens => self.submit_opens(state, conversation),
            Wish::SubmitCommits => Self::submit_commits(state, conversation),
            Wish::SubmitRollsBack => Self::submit_rolls_back(state, conversation),
            Wish::CancelTurn => Self::cancel_turn(state, conversation),
            Wish::DeleteMessage(message) => self.delete_message(state, conversation, message),
            Wish::EraseMessage(message) => Self::erase_message(state, conversation, message),
            Wish::RetryTurn(turn) => self.retry_turn(state, conversation, turn),
            Wish::MarkRead(up_to) => self.mark_read(state, conversation, up_to),
            Wish::DeleteConversation => self.delete_conversation(state, conversation),
            Wish::DeleteOperations => Self::delete_operations(state, conversation),
        }
    }

    fn look(&self, state: &mut State, conversation: u8, look: Look) {
        match look {
            Look::Claim => self.claim(state, conversation),
            Look::FindDue => state.relay.due = Some(conversation),
            Look::CloseEmptyLane => self.close_empty_lane(state, conversation),
            Look::AskForQueued => Self::ask_for_queued(state, conversation),
            Look::FindLost(lost) => Self::find_lost(state, conversation, lost),
            Look::LeaseEnds => Self::lease_ends(state, conversation),
        }
    }

    fn resume(&self, state: &mut State, resume: Resume) {
        match resume {
            Resume::ClaimWhatWasDue => self.claim_what_was_due(state),
            Resume::SendAgain => Self::extend_and_send_again(state),
            Resume::Recover => self.recover(state),
            Resume::Crash => Self::relay_crashes(state),
        }
    }

    fn transport(&self, state: &mut State, trigger: Trigger, way: Move) {
        match way {
            Move::Publish => self.publish(state, trigger),
            Move::PublishTimesOut => Self::publish_times_out(state, trigger),
            Move::PublishIsImpossible => self.publish_is_impossible(state, trigger),
            Move::GiveBack => self.release_unbegun(state, trigger),
            Move::ArrivesLate => self.arrives_late(state, trigger),
            Move::Vanishes => Self::vanishes(state, trigger),
            Move::IsForgotten => Self::is_forgotten(state, trigger),
        }
    }

    fn work(&self, state: &mut State, consumer: usize, work: Work) {
        match work {
            Work::Receive(trigger) => self.receive(state, consumer, trigger),
            Work::FindQueued(conversation) => Self::find_queued(state, consumer, conversation),
            Work::Begin { acked } => self.begin(state, consumer, acked),
            Work::ClaimAndBegin(conversation) => self.claim_and_begin(state, consumer, conversation),
            Work::StartOperation => self.start_operation(state, consumer),
            Work::InsertOperation => Self::insert_operation(state, consumer),
            Work::CallTool { acts } => Self::call_tool(state, consumer, acts),
            Work::EndOperation => Self::end_operation(state, consumer),
            Work::FinishLooks => Self::finish_looks(state, consumer),
            Work::Finish => self.finish(state, consumer),
            Work::FinishUnanswered { committed } => self.finish_unanswered(state, consumer, committed),
            Work::FinishAgain => self.finish_again(state, consumer),
            Work::SettleFenced => self.settle_fenced(state, consumer),
            Work::HandlerFails => self.handler_fails(state, consumer),
            Work::DeadlinePasses => self.deadline_passes(state, consumer),
            Work::CancelIsSeen => self.cancel_is_seen(state, consumer),
            Work::Leave => self.leave(state, consumer),
            Work::HandlerIsDropped => Self::handler_is_dropped(state, consumer),
            Work::Heartbeat => Self::heartbeat(state, consumer),
            Work::Crash => Self::consumer_crashes(state, consumer),
        }
    }
}

impl Doing {
    /// The run whose lease this slot renews, while it can.
    pub(crate) const fn run(self) -> Option<RunId> {
        match self {
            Self::Handling(run, _) | Self::Unsure(run) | Self::Fenced(run) => Some(run),
            Self::Nothing | Self::Received(_) | Self::Found(_) => None,
        }
    }
}

impl State {
    /// A transaction on this run's conversation need not wait.
    pub(crate) fn waits_for_nobody(&self, run: RunId) -> bool {
        self.conversations[usize::from(run.conversation)].is_free()
    }
}
