//! Every constraint by its name, with statements that it and no other refuses. A constraint without one fails the spec.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use tests::World;

use super::{execute, offenders, refused_by};

/// A constraint, and statements that break it alone, in the world of [`FIXTURE`].
type Guard = (&'static str, &'static [&'static str]);

/// `c1` has the pending message `m1` and the answered turn `1`; `c2` is idle. The operation is of run `2`.
const FIXTURE: &str = "
    select create_conversation('c1'), create_conversation('c2'), submit_message('m1', 'c1', 'hello');
    insert into messages (id, conversation_id, seq, role, content, turn_id, run_id, reply_to_seq)
    values ('r1', 'c1', 2, 'assistant', 'hi', uuid(1), uuid(2), 1);
    insert into agent_runs (run_id, turn_id, conversation_id, attempt, claimed_at, outcome)
    values (uuid(2), uuid(1), 'c1', 1, now(), 'done');
    insert into operations
        (id, run_id, turn_id, conversation_id, ordinal, name, effect, status, idempotency_key)
    values (uuid(3), uuid(2), uuid(1), 'c1', 1, 'look', 'read', 'started', uuid(4));
    insert into agent_sleepers values ('relay', now())";

/// A short way to write uuids.
const UUID: &str = "create function uuid(n int) returns uuid language sql
    return lpad(n::text, 32, '0')::uuid";

const POLICY: &[Guard] = &[
    ("agents_pkey", &["insert into agents (name) values ('default')"]),
    (
        "agents_name_is_one_token",
        &[
            "insert into agents (name) values ('')",
            "insert into agents (name) values ('a.b')",
            "insert into agents (name) values ('*')",
            "insert into agents (name) values ('>')",
            "insert into agents (name) values ('a b')",
            "insert into agents (name) values (E'a\\n')",
            "insert into agents (name) values ('é')",
            "insert into agents (name) values (repeat('x', 65))",
        ],
    ),
    (
        "agents_debounce_range",
        &[
            "update agents set debounce = '-1 us'",
            "update agents set debounce = '1 min 1 us', max_wait = '1 hour'",
        ],
    ),
    ("agents_max_wait_range", &["update agents set max_wait = '1 hour 1 us'"]),
    ("agents_debounce_within_max_wait", &["update agents set debounce = '2 s 1 us'"]),
    (
        "agents_max_turn_messages_range",
        &["update agents set max_turn_messages = 0", "update agents set max_turn_messages = 1001"],
    ),
    (
        "agents_max_attempts_range",
        &["update agents set max_attempts = 0", "update agents set max_attempts = 101"],
    ),
    (
        "agents_retry_backoff_range",
        &[
            "update agents set retry_backoff = '-1 us'",
            "update agents set retry_backoff = '1 day 1 us', retry_backoff_max = '7 days'",
        ],
    ),
    ("agents_retry_backoff_max_range", &["update agents set retry_backoff_max = '7 days 1 us'"]),
    ("agents_backoff_within_its_max", &["update agents set retry_backoff = '5 min 1 us'"]),
    ("agents_lease_range", &["update agents set lease = '999 ms'", "update agents set lease = '1 mon'"]),
    (
        "agents_turn_timeout_range",
        &["update agents set turn_timeout = '0'", "update agents set turn_timeout = '8 days'"],
    ),
    (
        "agents_dispatch_timeout_range",
        &["update agents set dispatch_timeout = '499 ms'", "update agents set dispatch_timeout = '2 hours'"],
    ),
    (
        "agents_max_content_bytes_range",
        &["update agents set max_content_bytes = 0", "update agents set max_content_bytes = 1048577"],
    ),
];

const TALK: &[Guard] = &[
    ("conversations_pkey", &["insert into conversations (id) values ('c1')"]),
    (
        "conversations_id_length",
        &[
            "insert into conversations (id) values ('')",
            "insert into conversations (id) values (repeat('x', 201))",
            "insert into conversations (id) values (repeat('é', 101))",
        ],
    ),
    (
        "conversations_agent_exists",
        &[
            "insert into conversations (id, agent) values ('c3', 'nobody')",
            "update conversations set agent = 'nobody'",
            "delete from agents",
        ],
    ),
    ("conversations_unread_not_negative", &["update conversations set unread_count = -1"]),
    ("conversations_last_read_not_negative", &["update conversations set last_read_seq = -1"]),
    (
        "messages_pkey",
        &[
            "insert into messages (id, conversation_id, seq, role, content) values ('m1', 'c2', 1, 'user', '')",
        ],
    ),
    (
        "messages_id_length",
        &[
            "update messages set id = '' where id = 'r1'",
            "update messages set id = repeat('x', 201) where id = 'r1'",
        ],
    ),
    (
        "messages_conversation_id_fkey",
        &[
            "insert into messages (id, conversation_id, seq, role, content) values ('m2', 'no', 1, 'user', '')",
        ],
    ),
    (
        "messages_seq_once",
        &[
            "insert into messages (id, conversation_id, seq, role, content) values ('m2', 'c1', 1, 'user', '')",
        ],
    ),
    ("messages_role_known", &["update messages set role = 'system' where id = 'r1'"]),
    ("messages_content_bounded", &["update messages set content = repeat('x', 16777217) where id = 'm1'"]),
    (
        "messages_error_is_explained",
        &[
            "update messages set role = 'error' where id = 'r1'",
            "update messages set error = '{}' where id = 'r1'",
            "update messages set error = '{}' where id = 'm1'",
        ],
    ),
    (
        "messages_outcome_names_its_turn",
        &[
            "update messages set turn_id = uuid(9) where id = 'm1'",
            "update messages set reply_to_seq = 1 where id = 'm1'",
            "update messages set turn_id = null where id = 'r1'",
            "update messages set reply_to_seq = null where id = 'r1'",
        ],
    ),
    ("messages_user_has_no_run", &["update messages set run_id = uuid(2) where id = 'm1'"]),
    ("messages_reply_has_its_run", &["update messages set run_id = null where id = 'r1'"]),
    ("messages_tombstone_is_empty", &["update messages set deleted_at = now() where id = 'm1'"]),
    (
        "messages_one_outcome_a_turn",
        &[
            "insert into messages (id, conversation_id, seq, role, content, turn_id, run_id, reply_to_seq)
             values ('r2', 'c1', 3, 'assistant', 'hi again', uuid(1), uuid(9), 1)",
            "insert into messages (id, conversation_id, seq, role, content, turn_id, error, reply_to_seq)
             values ('r2', 'c1', 3, 'error', 'oh', uuid(1), '{}', 1)",
        ],
    ),
];

const WORK: &[Guard] = &[
    (
        "agent_outbox_pkey",
        &[
            "insert into agent_outbox (id, conversation_id, message_id) select id, 'c1', 'r1' from agent_outbox",
        ],
    ),
    (
        "agent_outbox_conversation_id_fkey",
        &["insert into agent_outbox (conversation_id, message_id) values ('no', 'r1')"],
    ),
    (
        "agent_outbox_message_id_fkey",
        &["insert into agent_outbox (conversation_id, message_id) values ('c1', 'no')"],
    ),
    (
        "agent_outbox_one_row_a_message",
        &["insert into agent_outbox (conversation_id, message_id) values ('c1', 'm1')"],
    ),
    ("agent_outbox_status_known", &["update agent_outbox set status = 'odd', turn_id = uuid(9)"]),
    ("agent_outbox_attempts_not_negative", &["update agent_outbox set attempts = -1"]),
    ("agent_outbox_generation_positive", &["update agent_outbox set generation = 0"]),
    ("agent_outbox_trace_context_bounded", &["update agent_outbox set trace_context = repeat('x', 513)"]),
    (
        "agent_outbox_only_pending_rows_are_free",
        &[
            "update agent_outbox set status = 'processing', run_id = uuid(9)",
            "update agent_outbox set status = 'done', processed_at = now()",
            "update agent_outbox set status = 'error', processed_at = now()",
        ],
    ),
    (
        "agent_outbox_processing_names_its_run",
        &["update agent_outbox set status = 'processing', turn_id = uuid(9)"],
    ),
    ("agent_outbox_pending_has_no_run", &["update agent_outbox set turn_id = uuid(9), run_id = uuid(9)"]),
    (
        "agent_outbox_settled_has_its_time",
        &[
            "update agent_outbox set status = 'done', turn_id = uuid(9)",
            "update agent_outbox set status = 'error', turn_id = uuid(9)",
            "update agent_outbox set processed_at = now()",
        ],
    ),
    // What fits each state has a spec of its own, in `lanes`.
    ("agent_lanes_columns_fit_state", &["update agent_lanes set state = 'odd'"]),
    ("agent_lanes_pkey", &["insert into agent_lanes (conversation_id, agent) values ('c1', 'default')"]),
    (
        "agent_lanes_conversation_id_fkey",
        &["insert into agent_lanes (conversation_id, agent) values ('no', 'default')"],
    ),
    ("agent_sleepers_pkey", &["insert into agent_sleepers values ('relay', now())"]),
];

const PAST: &[Guard] = &[
    ("agent_runs_attempt_positive", &["update agent_runs set attempt = 0"]),
    ("agent_runs_outcome_known", &["update agent_runs set outcome = 'fine'"]),
    (
        "agent_runs_conversation_id_fkey",
        &["insert into agent_runs (run_id, turn_id, conversation_id, attempt, claimed_at, outcome)
           values (uuid(8), uuid(9), 'no', 1, now(), 'done')"],
    ),
    (
        "agent_runs_pkey",
        &["insert into agent_runs (run_id, turn_id, conversation_id, attempt, claimed_at, outcome)
           values (uuid(2), uuid(9), 'c1', 1, now(), 'done')"],
    ),
    (
        "agent_runs_one_run_an_attempt",
        &["insert into agent_runs (run_id, turn_id, conversation_id, attempt, claimed_at, outcome)
           values (uuid(8), uuid(1), 'c1', 1, now(), 'done')"],
    ),
    (
        "operations_pkey",
        &["insert into operations
               (id, run_id, turn_id, conversation_id, ordinal, name, effect, status, idempotency_key)
           values (uuid(3), uuid(2), uuid(1), 'c1', 2, 'look', 'read', 'started', uuid(4))"],
    ),
    (
        "operations_ordinal_once",
        &["insert into operations
               (id, run_id, turn_id, conversation_id, ordinal, name, effect, status, idempotency_key)
           values (uuid(8), uuid(2), uuid(1), 'c1', 1, 'look', 'read', 'started', uuid(4))"],
    ),
    (
        "operations_name_length",
        &["update operations set name = ''", "update operations set name = repeat('x', 201)"],
    ),
    ("operations_effect_known", &["update operations set effect = 'write'"]),
    ("operations_status_known", &["update operations set status = 'odd', ended_at = now()"]),
    (
        "operations_ended_has_its_time",
        &[
            "update operations set status = 'completed'",
            "update operations set status = 'failed'",
            "update operations set ended_at = now()",
        ],
    ),
    ("operations_message_id_fkey", &["update operations set message_id = 'no'"]),
];

/// Constraints that refuse rows, and unique indexes that belong to none.
const ALL: &str = "
    select conname::text from pg_constraint c join pg_class t on t.oid = c.conrelid
    where c.connamespace = 'public'::regnamespace and c.contype in ('c', 'u', 'p', 'f', 'x')
      and t.relname <> '_sqlx_migrations'
    union
    select i.indexrelid::regclass::text from pg_index i join pg_class t on t.oid = i.indrelid
    where i.indisunique and t.relnamespace = 'public'::regnamespace and t.relname <> '_sqlx_migrations'";

#[tokio::test(flavor = "multi_thread")]
async fn every_constraint_refuses_what_it_stands_for() -> Result<()> {
    let world = World::new().await?;
    execute(&world.pool, UUID).await?;
    execute(&world.pool, FIXTURE).await?;
    let guards: Vec<Guard> = [POLICY, TALK, WORK, PAST].concat();
    for (constraint, statements) in &guards {
        for statement in *statements {
            let by = refused_by(&world.pool, statement).await;
            ensure!(by == *constraint, "{statement}\nwas to be refused by {constraint}, and was by {by}");
        }
    }
    let tried: BTreeSet<String> = guards.iter().map(|(constraint, _)| (*constraint).into()).collect();
    let all: BTreeSet<String> = offenders(&world.pool, ALL).await?.into_iter().collect();
    let untried: Vec<_> = all.symmetric_difference(&tried).collect();
    ensure!(
        untried.is_empty(),
        "constraints without a statement that they refuse, or the reverse: {untried:?}"
    );
    Ok(())
}
