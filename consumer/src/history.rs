//! The order in which a handler reads a conversation: by turn, a turn's messages before its outcome, the present turn
//! last. The order of `seq` is not that: a message that came while a turn ran stands before that turn's reply.

use shared::state::Role;

use crate::handler::TurnMessage;

/// A message with what orders it.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) message: TurnMessage,
    /// An outcome's: the last seq of the turn that it answers.
    pub(crate) reply_to_seq: Option<i64>,
}

/// Orders a conversation by turn.
///
/// A user's message belongs to the turn of the first outcome that answers up to it or beyond; one that no outcome reaches
/// comes after all that are answered.
pub(crate) fn by_turn(entries: Vec<Entry>) -> Vec<TurnMessage> {
    let mut ends: Vec<i64> = entries.iter().filter_map(|entry| entry.reply_to_seq).collect();
    ends.sort_unstable();
    let end_of = |seq: i64| ends.get(ends.partition_point(|end| *end < seq)).copied().unwrap_or(i64::MAX);
    let mut keyed: Vec<_> = entries
        .into_iter()
        .map(|entry| {
            let message = entry.message;
            let end = entry.reply_to_seq.unwrap_or_else(|| end_of(message.seq));
            ((message.in_turn, end, message.role != Role::User, message.seq), message)
        })
        .collect();
    keyed.sort_by_key(|(key, _)| *key);
    keyed.into_iter().map(|(_, message)| message).collect()
}

#[cfg(test)]
mod tests {
    use shared::ids::MessageId;

    use super::*;

    fn user(seq: i64, in_turn: bool) -> Entry {
        entry(seq, Role::User, in_turn, None)
    }

    fn outcome(seq: i64, role: Role, reply_to_seq: i64) -> Entry {
        entry(seq, role, false, Some(reply_to_seq))
    }

    fn entry(seq: i64, role: Role, in_turn: bool, reply_to_seq: Option<i64>) -> Entry {
        let id = MessageId::new(seq.to_string()).unwrap();
        Entry { message: TurnMessage { id, seq, role, content: String::new(), in_turn }, reply_to_seq }
    }

    fn seqs(entries: Vec<Entry>) -> Vec<i64> {
        by_turn(entries).into_iter().map(|message| message.seq).collect()
    }

    #[test]
    fn a_message_that_came_while_a_turn_ran_is_read_after_that_turns_reply() {
        // 1 was being answered when 2 came; 3 answers 1.
        assert_eq!(seqs(vec![user(2, true), user(1, false), outcome(3, Role::Assistant, 1)]), [1, 3, 2]);
    }

    #[test]
    fn several_messages_of_one_turn_stand_before_its_outcome() {
        let entries = vec![
            outcome(6, Role::Assistant, 4),
            outcome(3, Role::Assistant, 2),
            user(1, false),
            user(2, false),
            user(4, false),
            user(5, true),
        ];
        assert_eq!(seqs(entries), [1, 2, 3, 4, 6, 5]);
    }

    #[test]
    fn the_present_turn_is_last_even_where_it_is_older_than_the_rest() {
        // 1 failed (2), 3 was answered (4), then the user tried 1 again.
        let entries =
            vec![user(1, true), outcome(2, Role::Error, 1), user(3, false), outcome(4, Role::Assistant, 3)];
        assert_eq!(seqs(entries), [2, 3, 4, 1]);
    }
}
