-- Policy: what must be the same for every process that serves an agent. Processes re-read it every few seconds;
-- submit_message reads it in the application's own transaction. A row that contradicts itself is refused here.
create table agents (
    name              text primary key
        constraint agents_name_is_one_token check (name ~ '^[A-Za-z0-9_-]{1,64}$'),
    debounce          interval not null default '100 ms'
        constraint agents_debounce_range check (debounce between '0' and '1 min'),
    max_wait          interval not null default '2 s'
        constraint agents_max_wait_range check (max_wait between '0' and '1 hour'),
    max_turn_messages int      not null default 50
        constraint agents_max_turn_messages_range check (max_turn_messages between 1 and 1000),
    max_attempts      int      not null default 5
        constraint agents_max_attempts_range check (max_attempts between 1 and 100),
    retry_backoff     interval not null default '1 s'
        constraint agents_retry_backoff_range check (retry_backoff between '0' and '1 day'),
    retry_backoff_max interval not null default '5 min'
        constraint agents_retry_backoff_max_range check (retry_backoff_max between '0' and '7 days'),
    lease             interval not null default '15 s'
        constraint agents_lease_range check (lease between '1 s' and '1 hour'),
    turn_timeout      interval not null default '10 min'
        constraint agents_turn_timeout_range check (turn_timeout between '1 ms' and '7 days'),
    dispatch_timeout  interval not null default '30 s'
        constraint agents_dispatch_timeout_range check (dispatch_timeout between '500 ms' and '1 hour'),
    max_content_bytes int      not null default 262144
        constraint agents_max_content_bytes_range check (max_content_bytes between 1 and 1048576),
    paused            boolean  not null default false,
    constraint agents_debounce_within_max_wait check (debounce <= max_wait),
    constraint agents_backoff_within_its_max check (retry_backoff <= retry_backoff_max)
);

comment on table agents is 'Policy, one row an agent; read by relay, consumer and submit_message.';
comment on column agents.name is 'Names the agent in subjects, durables and flags. Read by everyone.';
comment on column agents.debounce is 'Quiet time after a message before its lane is due. Read by submit_message.';
comment on column agents.max_wait is 'The longest that debouncing may hold a first message back. Read by submit_message.';
comment on column agents.max_turn_messages is 'Rows one turn may take. Read by the claim.';
comment on column agents.max_attempts is 'Runs a turn gets before its error is shown. Read by settle.';
comment on column agents.retry_backoff is 'Wait before the second attempt; doubles from there. Read by settle.';
comment on column agents.retry_backoff_max is 'Ceiling of the doubled wait. Read by settle.';
comment on column agents.lease is 'How long a run lives without a renewal. Read by begin, heartbeat and direct claim.';
comment on column agents.turn_timeout is 'Deadline of one run of the handler. Read by the consumer.';
comment on column agents.dispatch_timeout is 'How long a queued lane may wait for its begin before the relay asks the broker. Read by claim and look-after.';
comment on column agents.max_content_bytes is 'Cap of one message''s content, in bytes. Read by submit_message.';
comment on column agents.paused is 'True: no claims; what is in flight goes on. Read by every claimer.';
comment on index agents_pkey is 'Guard: one policy an agent. Read by everyone.';

insert into agents (name) values ('default');
