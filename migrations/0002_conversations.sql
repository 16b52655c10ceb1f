-- What people see: conversations and their messages. No queue mechanics in here.
create table conversations (
    id              text        primary key
        constraint conversations_id_length check (octet_length(id) between 1 and 200),
    agent           text        not null default 'default'
        constraint conversations_agent_exists references agents (name),
    last_seq        bigint      not null default 0,
    unread_count    int         not null default 0
        constraint conversations_unread_not_negative check (unread_count >= 0),
    last_read_seq   bigint      not null default 0
        constraint conversations_last_read_not_negative check (last_read_seq >= 0),
    last_message_at timestamptz,
    created_at      timestamptz not null default clock_timestamp()
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05);

create index conversations_agent on conversations (agent);

comment on table conversations is 'One row a conversation. Its row lock orders submit and settle against each other.';
comment on column conversations.id is 'The application''s id, any text of 1 to 200 bytes. Read by everyone.';
comment on column conversations.agent is 'Who answers. Copied into the lane. Read by submit_message and the view conversation_status.';
comment on column conversations.last_seq is 'The last seq given out. Read and raised by submit_message and settle.';
comment on column conversations.unread_count is 'Outcomes above last_read_seq. Raised by settle; read by the application.';
comment on column conversations.last_read_seq is 'How far the user has read. Written by the application; read when unread_count is recounted.';
comment on column conversations.last_message_at is 'When the newest message was made. Read by the application''s list of conversations.';
comment on column conversations.created_at is 'When the conversation was made. Read by the view conversation_status.';
comment on index conversations_pkey is 'Read by submit_message and settle, which lock the conversation, and by foreign keys.';
comment on index conversations_agent is 'Read when an agent is deleted or renamed, by its foreign key.';

create table messages (
    id              text        primary key
        constraint messages_id_length check (octet_length(id) between 1 and 200),
    conversation_id text        not null references conversations (id) on delete cascade,
    seq             bigint      not null,
    role            text        not null
        constraint messages_role_known check (role in ('user', 'assistant', 'error')),
    content         text        not null
        constraint messages_content_bounded check (octet_length(content) <= 16777216),
    turn_id         uuid,
    run_id          uuid,
    reply_to_seq    bigint,
    error           jsonb,
    deleted_at      timestamptz,
    created_at      timestamptz not null default clock_timestamp(),
    constraint messages_seq_once unique (conversation_id, seq),
    constraint messages_error_is_explained check ((role = 'error') = (error is not null)),
    constraint messages_outcome_names_its_turn
        check ((role = 'user') = (turn_id is null) and (role = 'user') = (reply_to_seq is null)),
    constraint messages_user_has_no_run check (role <> 'user' or run_id is null),
    constraint messages_reply_has_its_run check (role <> 'assistant' or run_id is not null),
    constraint messages_tombstone_is_empty check (deleted_at is null or content = '')
);

create unique index messages_one_outcome_a_turn on messages (turn_id) where role <> 'user';
create index messages_outcomes on messages (conversation_id, reply_to_seq) where role <> 'user';

comment on table messages is 'What the user and the assistant said, and the errors that the user sees.';
comment on column messages.id is 'A user''s message: the client''s id, the key of a repeated submit. An outcome: fresh and random.';
comment on column messages.conversation_id is 'Owner. Read by load, submit_message, the cascade.';
comment on column messages.seq is 'Place in the conversation, ascending in commit order. Read by load, turn ids and clients.';
comment on column messages.role is 'user, assistant or error. Read by load and clients.';
comment on column messages.content is 'The text, kept here only. Read by load and clients, never by the relay.';
comment on column messages.turn_id is 'An outcome''s turn. Read by the uniqueness of outcomes and by --wait.';
comment on column messages.run_id is 'The run that wrote an outcome; null when a turn was ended without one. Read by audits.';
comment on column messages.reply_to_seq is 'The last seq of the turn that an outcome answers. Read by load, which orders history by turn.';
comment on column messages.error is 'Why a turn failed: kind, attempts, exhausted, retryable, operations. Read by clients and operators.';
comment on column messages.deleted_at is 'A tombstone''s time: content is empty, the id stays taken. Read by load and submit_message.';
comment on column messages.created_at is 'When it was written, in the database''s clock. Read by clients and latency figures.';
comment on index messages_pkey is 'Read by submit_message (duplicates), the claim (seq) and foreign keys.';
comment on index messages_seq_once is 'Read by load (history backwards), the cascade, clients.';
comment on index messages_one_outcome_a_turn is 'Guard: at most one outcome a turn. Read by --wait.';
comment on index messages_outcomes is 'Read by load: the outcomes before a turn, however many messages wait behind it.';
