-- What the server knows of a conversation, and nothing guessed: "thinking" is a run whose lease is alive.
create view conversation_status as
select
    l.conversation_id,
    l.agent,
    case
        when l.state = 'idle' and outcome.role = 'error' then 'error'
        when l.state = 'idle' then 'idle'
        when l.state = 'waiting' and l.attempt > 0 then 'retrying'
        when l.state = 'waiting' then 'waiting'
        when l.state = 'queued' then 'queued'
        when l.wake_at > clock_timestamp() then 'thinking'
        else 'recovering'
    end as status,
    case
        when l.state = 'idle' then coalesce(outcome.created_at, c.last_message_at, c.created_at)
        when l.state = 'waiting' and l.attempt > 0 then coalesce(previous.ended_at, l.waiting_since)
        when l.state = 'waiting' then l.waiting_since
        when l.state = 'queued' then l.claimed_at
        when l.wake_at > clock_timestamp() then l.started_at
        else l.wake_at
    end as since,
    l.attempt,
    l.turn_id,
    l.run_id,
    l.worker,
    l.wake_at,
    l.cancel_requested,
    c.last_seq,
    c.unread_count
from conversations c
join agent_lanes l on l.conversation_id = c.id
left join lateral (
    -- An idle lane's newest message is an outcome, or a tombstone before one, so this reads a row or a few.
    select m.role, m.created_at from messages m
    where l.state = 'idle' and m.conversation_id = c.id and m.role <> 'user' and m.deleted_at is null
    order by m.seq desc limit 1
) outcome on true
left join lateral (
    select r.ended_at from agent_runs r
    where l.state = 'waiting' and r.turn_id = l.turn_id and r.attempt = l.attempt
) previous on true;

comment on view conversation_status is
    'idle, waiting, queued, thinking, recovering, retrying or error, with since and attempt. Read by clients, relay status and the console.';
