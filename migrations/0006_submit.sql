-- Who sleeps: a claimer that has nothing to do says so here, and only then does a commit send a NOTIFY. A notification
-- takes a lock on the whole cluster through the commit's flush, so an awake relay must not cost producers anything.
-- Unlogged: after a crash it is empty, and every sleeper says so again.
create unlogged table agent_sleepers (
    name  text        primary key,
    until timestamptz not null
) with (fillfactor = 50);

comment on table agent_sleepers is 'Relays and direct consumers that wait for a NOTIFY on the channel agent_lanes.';
comment on column agent_sleepers.name is 'The sleeper. Written by itself.';
comment on column agent_sleepers.until is 'It looks by itself from then on. Read by agent_lanes_notify.';
comment on index agent_sleepers_pkey is 'Guard: one row a sleeper, which says it again with every sleep.';

create function agent_lanes_notify() returns boolean language plpgsql set search_path from current as $$
begin
    if exists (select from agent_sleepers where until > clock_timestamp()) then
        perform pg_notify('agent_lanes', '');
        return true;
    end if;
    return false;
end $$;

comment on function agent_lanes_notify is 'Wakes the sleepers at this transaction''s commit, if there are any.';

create function create_conversation(id text, agent text default 'default') returns text
language plpgsql set search_path from current as $$
declare
    p_id alias for $1;
    p_agent alias for $2;
begin
    if p_id is null or octet_length(p_id) not between 1 and 200 then
        raise exception 'conversation_id_invalid'
            using errcode = 'OB006', detail = 'conversation_id must be 1 to 200 bytes', column = 'conversation_id';
    end if;
    perform from agents a where a.name = p_agent;
    if not found then
        raise exception 'agent_not_found' using errcode = 'OB005', column = 'agent';
    end if;
    insert into conversations (id, agent) values (p_id, p_agent) on conflict do nothing;
    return case when found then 'created' else 'duplicate' end;
end $$;

comment on function create_conversation is 'Makes a conversation unless it is there: created or duplicate; raises agent_not_found.';

create function submit_message(message_id text, conversation_id text, content text, trace_context text default null)
returns text language plpgsql set search_path from current as $$
declare
    p_message alias for $1;
    p_conversation alias for $2;
    p_content alias for $3;
    p_trace alias for $4;
    policy record;
    known record;
    next_seq bigint;
    noticed timestamptz;
begin
    if p_message is null or octet_length(p_message) not between 1 and 200 then
        raise exception 'message_id_invalid'
            using errcode = 'OB007', detail = 'message_id must be 1 to 200 bytes', column = 'message_id';
    end if;
    if p_conversation is null or octet_length(p_conversation) not between 1 and 200 then
        raise exception 'conversation_id_invalid'
            using errcode = 'OB006', detail = 'conversation_id must be 1 to 200 bytes', column = 'conversation_id';
    end if;
    if p_content is null then
        raise exception 'content_missing' using errcode = 'OB008', column = 'content';
    end if;
    if octet_length(p_trace) > 512 then
        raise exception 'trace_context_too_long'
            using errcode = 'OB009', detail = 'trace_context must be at most 512 bytes', column = 'trace_context';
    end if;

    -- Locks the conversation: submits and settles of one conversation happen one after the other.
    select a.debounce, a.max_wait, a.max_content_bytes into policy
    from conversations c join agents a on a.name = c.agent
    where c.id = p_conversation
    for no key update of c;
    if not found then
        raise exception 'conversation_not_found' using errcode = 'OB002', column = 'conversation_id';
    end if;
    if octet_length(p_content) > policy.max_content_bytes then
        raise exception 'content_too_large'
            using errcode = 'OB003', column = 'content',
                  detail = format('content may have %s bytes', policy.max_content_bytes);
    end if;

    select m.conversation_id = p_conversation and m.role = 'user' as ours, m.content = p_content as same,
           m.deleted_at is not null as deleted
    into known
    from messages m where m.id = p_message;
    if found then
        if known.ours and known.deleted then
            raise exception 'message_deleted' using errcode = 'OB004', column = 'message_id';
        end if;
        if known.ours and known.same then
            return 'duplicate';
        end if;
        raise exception 'message_id_conflict' using errcode = 'OB001', column = 'message_id';
    end if;

    update conversations c set last_seq = c.last_seq + 1, last_message_at = clock_timestamp()
    where c.id = p_conversation
    returning c.last_seq into next_seq;

    -- The same id may be on its way into another conversation: its transaction decides.
    insert into messages (id, conversation_id, seq, role, content)
    values (p_message, p_conversation, next_seq, 'user', p_content)
    on conflict (id) do nothing;
    if not found then
        raise exception 'message_id_conflict' using errcode = 'OB001', column = 'message_id';
    end if;

    insert into agent_outbox (conversation_id, message_id, trace_context)
    values (p_conversation, p_message, p_trace);

    -- A plain update: an upsert would lock the lanes that it leaves alone, and make a begin wait for the application's
    -- open transaction. A lane that is in flight, or waits for a turn's retry, is left alone: the settle that ends it
    -- looks for pending rows.
    noticed := clock_timestamp();
    update agent_lanes l
    set state = 'waiting',
        waiting_since = coalesce(l.waiting_since, noticed),
        wake_at = least(coalesce(l.waiting_since, noticed) + policy.max_wait, noticed + policy.debounce)
    where l.conversation_id = p_conversation
      and (l.state = 'idle' or (l.state = 'waiting' and l.turn_id is null));
    if found then
        perform agent_lanes_notify();
    elsif current_setting('transaction_isolation') <> 'read committed' then
        -- Under an old snapshot the lane may only look busy, and have fallen idle since: this lock then fails (40001).
        perform from agent_lanes l where l.conversation_id = p_conversation for share;
    end if;
    return 'created';
end $$;

comment on function submit_message is
    'Writes a user''s message, its outbox row and its lane in the caller''s transaction: created or duplicate. Raises '
    'message_id_conflict, message_deleted, conversation_not_found, content_too_large.';
