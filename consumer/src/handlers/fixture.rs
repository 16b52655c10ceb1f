//! A turn to hand to a handler under test. Its operations lead to a database that nobody runs.

use std::{sync::Arc, time::Duration};

use shared::{
    ids::{AgentName, ConversationId, MessageId, RunId, TurnId},
    state::Role,
};
use sqlx::postgres::PgPoolOptions;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    handler::{Turn, TurnMessage},
    operations::Operations,
};

/// Operations that cannot be recorded: port 1 refuses connections.
pub(crate) fn operations_without_database(run_id: RunId) -> Operations {
    let pool = PgPoolOptions::new()
        .acquire_timeout(Duration::from_millis(200))
        .connect_lazy("postgres://nobody@127.0.0.1:1/nowhere")
        .unwrap();
    Operations::new(pool, ConversationId::new("c 1").unwrap(), TurnId(Uuid::nil()), run_id)
}

/// Two messages to answer, after one of the user and one of the agent.
pub(crate) fn turn() -> Turn {
    let message = |seq: i64, role, content: &str, in_turn| TurnMessage {
        id: MessageId::new(format!("m{seq}")).unwrap(),
        seq,
        role,
        content: content.into(),
        in_turn,
    };
    let run_id = RunId::fresh();
    Turn {
        turn_id: TurnId(Uuid::nil()),
        run_id,
        attempt: 2,
        conversation_id: ConversationId::new("c 1").unwrap(),
        agent: AgentName::new("default").unwrap(),
        messages: Arc::new([
            message(1, Role::User, "before", false),
            message(2, Role::Assistant, "an answer", false),
            message(3, Role::User, "Grüezi", true),
            message(4, Role::User, "and more", true),
        ]),
        trace_context: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into()),
        operations: operations_without_database(run_id),
        cancelled: CancellationToken::new(),
    }
}
