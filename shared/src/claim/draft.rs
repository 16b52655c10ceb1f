//! What a claim is about to write, between what it read and what it says.

use std::collections::BTreeMap;

use super::{
    Claimed, Claims,
    sql::{DueLane, FreeRow, Marked},
};
use crate::ids::{AgentName, ConversationId, RunId, TurnId};

/// What is about to be written: a turn for each lane that has rows.
pub(super) struct Draft {
    pub(super) turns: BTreeMap<ConversationId, DraftTurn>,
    pub(super) empty: Vec<ConversationId>,
}

pub(super) struct DraftTurn {
    pub(super) agent: AgentName,
    pub(super) turn_id: TurnId,
    pub(super) run_id: RunId,
    pub(super) rows: Vec<i64>,
    pub(super) trace_context: Option<String>,
}

impl Draft {
    pub(super) fn new(lanes: Vec<DueLane>, rows: Vec<FreeRow>) -> Self {
        let mut by_lane: BTreeMap<ConversationId, Vec<FreeRow>> = BTreeMap::new();
        for row in rows {
            by_lane.entry(row.conversation_id.clone()).or_default().push(row);
        }
        let mut draft = Self { turns: BTreeMap::new(), empty: Vec::new() };
        for lane in lanes {
            match by_lane.remove(&lane.conversation_id) {
                Some(mut rows) => {
                    rows.sort_unstable_by_key(|row| row.id);
                    let turn = DraftTurn::new(&lane, rows);
                    draft.turns.insert(lane.conversation_id, turn);
                }
                None => draft.empty.push(lane.conversation_id),
            }
        }
        draft
    }

    pub(super) fn claims(self, marked: Vec<Marked>) -> Claims {
        let mut claims = Claims { empty: self.empty, ..Claims::default() };
        let mut drafts = self.turns;
        for lane in marked {
            let Some(turn) = drafts.remove(&lane.conversation_id) else { continue };
            claims.rows += turn.rows.len();
            if lane.suspect {
                claims.suspects.insert(turn.run_id);
            }
            claims.turns.push(Claimed {
                conversation_id: lane.conversation_id,
                agent: turn.agent,
                turn_id: turn.turn_id,
                run_id: turn.run_id,
                attempt: lane.attempt,
                dispatches: 1,
                trace_context: turn.trace_context,
            });
        }
        claims
    }
}

impl DraftTurn {
    fn new(lane: &DueLane, rows: Vec<FreeRow>) -> Self {
        let turn_id = lane.turn_id.unwrap_or_else(|| {
            let generation = rows.first().map_or(1, |row| row.generation);
            let messages = rows.iter().map(|row| (&row.message_id, row.seq));
            TurnId::derive(&lane.conversation_id, generation, messages)
        });
        Self {
            agent: lane.agent.clone(),
            turn_id,
            run_id: RunId::fresh(),
            rows: rows.iter().map(|row| row.id).collect(),
            trace_context: rows.into_iter().find_map(|row| row.trace_context),
        }
    }
}
