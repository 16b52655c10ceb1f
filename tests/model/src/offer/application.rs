//! Submits, deletions, and what users want.

use crate::{
    actions::{
        Action::{self, Application},
        Wish,
    },
    guard::Guard,
    protocol::Protocol,
    scenario::Chance,
    state::{Conversation, Said, State, TurnId},
};

impl Protocol {
    pub(super) fn offer_submit(
        &self,
        state: &State,
        number: u8,
        it: &Conversation,
        actions: &mut Vec<Action>,
    ) {
        if it.submit.is_some() {
            actions.push(Application(number, Wish::SubmitCommits));
            if state.budget.allows(Chance::Rollback) {
                actions.push(Application(number, Wish::SubmitRollsBack));
            }
        } else if it.is_free() && it.messages.iter().any(|message| message.said == Said::NotYet) {
            actions.push(Application(number, Wish::SubmitOpens));
        }
        if it.departing
            || state.budget.allows(Chance::Departure) && it.is_free() && self.has(Guard::DepartureLocksLane)
        {
            actions.push(Application(number, Wish::DeleteConversation));
        } else if state.budget.allows(Chance::Departure) && it.is_free() {
            actions.push(Application(number, Wish::DeleteOperations));
        }
    }

    pub(super) fn offer_user(&self, state: &State, number: u8, it: &Conversation, actions: &mut Vec<Action>) {
        let budget = &state.budget;
        for (message, stands) in it.messages.iter().enumerate() {
            if budget.allows(Chance::Erasure) && matches!(stands.said, Said::Visible | Said::Tombstone) {
                actions.push(Application(number, Wish::EraseMessage(message)));
            }
            if budget.allows(Chance::Deletion) && stands.said == Said::Visible && it.is_free() {
                actions.push(Application(number, Wish::DeleteMessage(message)));
            }
        }
        if !it.is_free() {
            return;
        }
        if budget.allows(Chance::Cancel) && it.lane.turn.is_some() && !it.lane.cancel_requested {
            actions.push(Application(number, Wish::CancelTurn));
        }
        if budget.allows(Chance::Retry) {
            self.offer_retries(number, it, actions);
        }
        if budget.allows(Chance::Reading) {
            let unread = it.read + 1..=u8::try_from(it.outcomes.len()).unwrap_or(u8::MAX);
            actions.extend(unread.map(|up_to| Application(number, Wish::MarkRead(up_to))));
        }
    }

    fn offer_retries(&self, number: u8, it: &Conversation, actions: &mut Vec<Action>) {
        let mut turns: Vec<TurnId> = it.rows().filter_map(|(_, row)| row.turn).collect();
        turns.dedup();
        turns.retain(|turn| it.messages.iter().any(|message| self.is_retried(message, *turn)));
        turns.retain(|turn| !self.has(Guard::RetryAsksAboutEffects) || !it.has_side_effect(*turn));
        actions.extend(turns.into_iter().map(|turn| Application(number, Wish::RetryTurn(turn))));
    }
}
