-- The work. A row is a trigger record for one user message, written in the message's own transaction.
create table agent_outbox (
    id              bigserial   primary key,
    conversation_id text        not null references conversations (id) on delete cascade,
    message_id      text        not null references messages (id) on delete cascade,
    status          text        not null default 'pending'
        constraint agent_outbox_status_known check (status in ('pending', 'processing', 'done', 'error')),
    attempts        int         not null default 0
        constraint agent_outbox_attempts_not_negative check (attempts >= 0),
    generation      int         not null default 1
        constraint agent_outbox_generation_positive check (generation >= 1),
    turn_id         uuid,
    run_id          uuid,
    trace_context   text
        constraint agent_outbox_trace_context_bounded check (octet_length(trace_context) <= 512),
    created_at      timestamptz not null default clock_timestamp(),
    processed_at    timestamptz,
    constraint agent_outbox_one_row_a_message unique (message_id),
    constraint agent_outbox_only_pending_rows_are_free check (status = 'pending' or turn_id is not null),
    constraint agent_outbox_processing_names_its_run check (status <> 'processing' or run_id is not null),
    constraint agent_outbox_pending_has_no_run check (status <> 'pending' or run_id is null),
    constraint agent_outbox_settled_has_its_time check ((status in ('done', 'error')) = (processed_at is not null))
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_analyze_scale_factor = 0.05
);

-- A row that is pending and in no turn is exactly a row with turn_id null, so this one index finds the next rows of a
-- lane (null first among its conversation, then by id), the rows of a turn, and the cascade's. The status stands in no
-- index: processing -> done and -> pending change no indexed column and stay HOT.
create index agent_outbox_turn on agent_outbox (conversation_id, turn_id, id);

comment on table agent_outbox is 'One row a user message: what has been, is being or must be answered.';
comment on column agent_outbox.id is 'Order of arrival within a conversation. Never leaves the database: a crash may give it out twice.';
comment on column agent_outbox.conversation_id is 'The lane it belongs to. Read by claim, settle, the cascade.';
comment on column agent_outbox.message_id is 'The message to answer. Read by claim and load.';
comment on column agent_outbox.status is 'pending, processing, done or error. Read by claim and settle.';
comment on column agent_outbox.attempts is 'Runs that were claimed for it. Read by audits.';
comment on column agent_outbox.generation is 'Raised by a user''s retry, so that the retried rows form a turn of their own. Read by the claim.';
comment on column agent_outbox.turn_id is 'The turn that it was claimed into; null: free. Read by claim, load and settle.';
comment on column agent_outbox.run_id is 'The run that is processing or ended it. Read by settle, as part of the fence.';
comment on column agent_outbox.trace_context is 'The producer''s W3C traceparent. Read by the claim.';
comment on column agent_outbox.created_at is 'When it was submitted. Read by settle (waiting_since) and latency figures.';
comment on column agent_outbox.processed_at is 'When it was settled. Read by prune.';
comment on index agent_outbox_turn is 'Read by claim, load, settle and the cascade of conversations.';
comment on index agent_outbox_one_row_a_message is 'Guard: one row a message. Read by the cascade of messages.';
comment on index agent_outbox_pkey is 'Read by the claim, which marks rows by id.';
