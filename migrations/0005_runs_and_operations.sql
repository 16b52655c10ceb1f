-- The past: ended runs, append-only, and what each run did to the world.
create table agent_runs (
    run_id          uuid        primary key,
    turn_id         uuid        not null,
    conversation_id text        not null references conversations (id) on delete cascade,
    attempt         int         not null
        constraint agent_runs_attempt_positive check (attempt >= 1),
    worker          text,
    claimed_at      timestamptz not null,
    started_at      timestamptz,
    ended_at        timestamptz not null default clock_timestamp(),
    outcome         text        not null
        constraint agent_runs_outcome_known
            check (outcome in ('done', 'retry', 'error', 'cancelled', 'expired', 'released')),
    error           jsonb,
    constraint agent_runs_one_run_an_attempt unique (turn_id, attempt)
);

create index agent_runs_conversation on agent_runs (conversation_id);

comment on table agent_runs is 'One row an ended run.';
comment on column agent_runs.run_id is 'The run. Read when an ambiguous commit is resolved.';
comment on column agent_runs.turn_id is 'The turn it attempted. Read by settle, operators and audits.';
comment on column agent_runs.conversation_id is 'Owner. Read by the cascade and conversation pages.';
comment on column agent_runs.attempt is 'Which attempt it was, from 1. Read by audits.';
comment on column agent_runs.worker is 'The consumer that ran it; null: it was never begun. Read by operators.';
comment on column agent_runs.claimed_at is 'When it was claimed. Read by audits of order.';
comment on column agent_runs.started_at is 'When it began. Read by operators.';
comment on column agent_runs.ended_at is 'When it was settled. Read by conversation_status and prune.';
comment on column agent_runs.outcome is 'done, retry, error, cancelled, expired (its lease was lost) or released (given back by a shutdown).';
comment on column agent_runs.error is 'Why it did not end well: kind and a safe text. Read by operators.';
comment on index agent_runs_pkey is 'Guard: a run ends once. Read when an ambiguous commit is resolved.';
comment on index agent_runs_one_run_an_attempt is 'Guard: an attempt is one run. Read by begin (did the attempt before this one lose its lease?), conversation_status and audits.';
comment on index agent_runs_conversation is 'Read by the cascade and conversation pages.';

create table operations (
    id              uuid        primary key,
    run_id          uuid        not null,
    turn_id         uuid        not null,
    conversation_id text        not null,
    ordinal         int         not null,
    name            text        not null
        constraint operations_name_length check (octet_length(name) between 1 and 200),
    effect          text        not null
        constraint operations_effect_known check (effect in ('read', 'idempotent', 'side_effect')),
    status          text        not null
        constraint operations_status_known check (status in ('started', 'completed', 'failed')),
    idempotency_key uuid        not null,
    input           jsonb,
    output          jsonb,
    message_id      text        references messages (id) on delete set null,
    started_at      timestamptz not null default clock_timestamp(),
    ended_at        timestamptz,
    constraint operations_ordinal_once unique (run_id, ordinal),
    constraint operations_ended_has_its_time check ((status = 'started') = (ended_at is null))
);

create index operations_turn on operations (conversation_id, turn_id);
create index operations_message on operations (message_id) where message_id is not null;

comment on table operations is 'One row a tool call, written before the tool is called.';
comment on column operations.id is 'The operation. Read by the handler that ends it.';
comment on column operations.run_id is 'The run that made it: the only way an operation finds its outcome.';
comment on column operations.turn_id is 'The turn. Read by settle: may this turn run again?';
comment on column operations.conversation_id is 'Owner, without a foreign key: a key would lock the conversation after the lane, which deadlocks with its deletion.';
comment on column operations.ordinal is 'Place within the run, from 1.';
comment on column operations.name is 'The tool. Read by settle, which names it in an error.';
comment on column operations.effect is 'read, idempotent or side_effect. Read by settle.';
comment on column operations.status is 'started, completed or failed. Read by settle: only a known failure leaves no effect.';
comment on column operations.idempotency_key is 'Equal for the same call in every attempt of a turn. Read by the tool.';
comment on column operations.input is 'What the tool was asked. Read by conversation pages.';
comment on column operations.output is 'What it answered. Read by conversation pages.';
comment on column operations.message_id is 'The outcome that shows it. Read by clients.';
comment on column operations.started_at is 'When it was recorded, before the call.';
comment on column operations.ended_at is 'When its end was recorded.';
comment on index operations_pkey is 'Read by the handler that ends an operation.';
comment on index operations_turn is 'Read by settle, and when a conversation is deleted.';
comment on index operations_message is 'Read when a message is deleted.';
comment on index operations_ordinal_once is 'Guard: an ordinal is one operation. Read by finish, which attaches by run.';

-- The deletion holds the conversation; it takes the lane next, as everybody does, before the cascade reaches the rest.
create function conversations_before_delete() returns trigger language plpgsql set search_path from current as $$
begin
    perform from agent_lanes where conversation_id = old.id for update;
    delete from operations where conversation_id = old.id;
    return old;
end $$;

create trigger conversations_before_delete before delete on conversations
    for each row execute function conversations_before_delete();

comment on function conversations_before_delete is 'Keeps the lock order of a deletion, and deletes the operations, which have no foreign key.';
