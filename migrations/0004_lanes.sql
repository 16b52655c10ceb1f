-- The present: one small, hot row a conversation, both locked and changed by every transition. At most one turn of a
-- conversation is in flight because there is one row to say so.
create table agent_lanes (
    conversation_id  text        primary key references conversations (id) on delete cascade,
    agent            text        not null,
    state            text        not null default 'idle',
    wake_at          timestamptz,
    waiting_since    timestamptz,
    turn_id          uuid,
    run_id           uuid,
    attempt          int         not null default 0,
    dispatches       int         not null default 0,
    worker           text,
    claimed_at       timestamptz,
    started_at       timestamptz,
    cancel_requested boolean     not null default false,
    constraint agent_lanes_columns_fit_state check (
        case state
            when 'idle' then
                num_nonnulls(wake_at, waiting_since, turn_id, run_id, worker, claimed_at, started_at) = 0
                and attempt = 0 and dispatches = 0 and not cancel_requested
            when 'waiting' then
                num_nonnulls(wake_at, waiting_since) = 2
                and num_nonnulls(run_id, worker, claimed_at, started_at) = 0
                and attempt >= 0 and (attempt = 0 or turn_id is not null)
                and dispatches = 0 and not cancel_requested
            when 'queued' then
                num_nonnulls(wake_at, waiting_since, turn_id, run_id, claimed_at) = 5
                and num_nonnulls(worker, started_at) = 0
                and attempt >= 1 and dispatches >= 1 and not cancel_requested
            when 'running' then
                num_nonnulls(wake_at, waiting_since, turn_id, run_id, worker, claimed_at, started_at) = 7
                and attempt >= 1
            else false
        end
    )
) with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.05
);

-- One index a state, so that a lane stands in the index of its state only: a backlog of a million waiting lanes lies in
-- nobody's way to the one lease that has expired, and a transition writes no more index entries than one index would.
-- "is not null" is always true there, and not idle talk: a statement must ask for wake_at to be given such an index. A
-- guard, which asks for a conversation and a state, could otherwise get one while the tables are small, and would then
-- read a whole backlog when they have grown.
create index agent_lanes_waiting on agent_lanes (wake_at) where state = 'waiting' and wake_at is not null;
create index agent_lanes_waiting_of_agent on agent_lanes (agent, wake_at)
    where state = 'waiting' and wake_at is not null;
create index agent_lanes_queued on agent_lanes (wake_at) where state = 'queued' and wake_at is not null;
create index agent_lanes_running on agent_lanes (wake_at) where state = 'running' and wake_at is not null;

comment on table agent_lanes is 'The ordering boundary of one conversation, and what it is doing now.';
comment on column agent_lanes.conversation_id is 'The conversation. Read by every guard.';
comment on column agent_lanes.agent is 'Whose consumers may begin it. Read by claim, begin and subjects.';
comment on column agent_lanes.state is 'idle, waiting, queued or running. Read by every guard.';
comment on column agent_lanes.wake_at is 'When somebody must look: waiting: due; queued: ask the broker; running: the lease ends. Read by relay and direct consumers.';
comment on column agent_lanes.waiting_since is 'When the first message of the next or present turn came. Read by submit_message (max_wait) and conversation_status.';
comment on column agent_lanes.turn_id is 'The turn in flight, or the one that waits for its next attempt. Read by claim, operations and settle.';
comment on column agent_lanes.run_id is 'The run in flight: the fence of every later write.';
comment on column agent_lanes.attempt is 'Which attempt at the turn this is. Read by settle.';
comment on column agent_lanes.dispatches is 'How often this run was handed to the broker. Read by publish (message ids) and look-after.';
comment on column agent_lanes.worker is 'The consumer that runs it. Read by operators and by a consumer that takes back its former runs.';
comment on column agent_lanes.claimed_at is 'When this run was claimed. Read by settle, which records it.';
comment on column agent_lanes.started_at is 'When this run began. Read by settle and conversation_status.';
comment on column agent_lanes.cancel_requested is 'The user wants the run stopped. Read by heartbeat, operations and settle.';
comment on index agent_lanes_pkey is 'Read by every guard.';
comment on index agent_lanes_waiting is 'Read by the claim (the longest due first) and by sleepers (the next to be due).';
comment on index agent_lanes_waiting_of_agent is 'The same for one agent: read by direct consumers, and by relays while an agent is paused.';
comment on index agent_lanes_queued is 'Read by look-after: whose trigger must be asked for?';
comment on index agent_lanes_running is 'Read by recovery: whose lease has expired?';

create function agent_lanes_made() returns trigger language plpgsql set search_path from current as $$
begin
    insert into agent_lanes (conversation_id, agent)
    select id, agent from created order by id;
    return null;
end $$;

create trigger agent_lanes_made after insert on conversations
    referencing new table as created for each statement execute function agent_lanes_made();

comment on function agent_lanes_made is 'Gives each new conversation its lane.';

create function agent_lanes_follow_agent() returns trigger language plpgsql set search_path from current as $$
begin
    update agent_lanes set agent = new.agent where conversation_id = new.id;
    return null;
end $$;

create trigger agent_lanes_follow_agent after update of agent on conversations
    for each row when (old.agent is distinct from new.agent) execute function agent_lanes_follow_agent();

comment on function agent_lanes_follow_agent is 'A conversation that moves to another agent takes its lane along.';
