-- What a user or an operator does to turns and messages. Each locks the conversation, then the lane, and decides in later
-- statements, so it excludes submit, finish and recovery as they exclude each other; prune alone takes settled rows
-- without them, and waits for nobody.
create index agent_outbox_by_turn on agent_outbox (turn_id) where turn_id is not null;
comment on index agent_outbox_by_turn is 'Read by retry_turn and cancel_turn, which are given a turn only, and by prune, which takes whole turns.';

create index messages_errors on messages (created_at, id) where role = 'error';
comment on index messages_errors is 'Read by relay failed and requeue: the errors in order, without a look at history.';

-- Where a turn belongs: by its rows, by its outcome where its rows were retried or pruned, or by its runs where a message
-- was deleted out of it.
create function agent_turn_conversation(turn uuid) returns text language sql stable set search_path from current as $$
    select coalesce(
        (select conversation_id from agent_outbox where turn_id = turn limit 1),
        (select conversation_id from messages where turn_id = turn and role <> 'user'),
        (select conversation_id from agent_runs where turn_id = turn limit 1))
$$;
comment on function agent_turn_conversation is 'The conversation of a turn; null: there is no such turn. Read by retry_turn and cancel_turn.';

-- True where rows of the turn ended in an error and can be answered again: a deleted message's cannot.
create function agent_turn_is_failed(conversation text, turn uuid) returns boolean
language sql stable set search_path from current as $$
    select exists (
        select from agent_outbox o join messages m on m.id = o.message_id
        where o.conversation_id = conversation and o.turn_id = turn
          and o.status = 'error' and m.deleted_at is null)
$$;
comment on function agent_turn_is_failed is 'Is this turn failed now? Read by relay failed and requeue.';

-- True where a tool call of the turn may have changed the world: anything but a known failure.
create function agent_turn_has_side_effect(conversation text, turn uuid) returns boolean
language sql stable set search_path from current as $$
    select exists (
        select from operations
        where conversation_id = conversation and turn_id = turn
          and effect = 'side_effect' and status <> 'failed')
$$;
comment on function agent_turn_has_side_effect is 'May this turn run again? Read by retry_turn, delete_message, relay failed and requeue.';

-- What a lane does when its turn is over: it waits where rows are free, else it is idle. The caller holds both locks.
create function agent_lanes_free(conversation text) returns void language plpgsql set search_path from current as $$
declare
    oldest timestamptz;
begin
    select created_at into oldest from agent_outbox
    where conversation_id = conversation and turn_id is null
    order by turn_id, id limit 1;
    update agent_lanes
    set state = case when oldest is null then 'idle' else 'waiting' end,
        wake_at = case when oldest is not null then clock_timestamp() end,
        waiting_since = oldest,
        turn_id = null, run_id = null, attempt = 0, dispatches = 0,
        worker = null, claimed_at = null, started_at = null, cancel_requested = false
    where conversation_id = conversation;
    if oldest is not null then
        perform agent_lanes_notify();
    end if;
end $$;
comment on function agent_lanes_free is 'Ends the turn of a lane whose locks the caller holds.';

create function retry_turn(turn_id uuid, confirm_side_effects boolean default false) returns text
language plpgsql set search_path from current as $$
declare
    p_turn alias for $1;
    owner text := agent_turn_conversation($1);
    lane agent_lanes;
begin
    perform from conversations where id = owner for no key update;
    if not found then
        raise exception 'turn_not_found' using errcode = 'OB010', column = 'turn_id';
    end if;
    select * into lane from agent_lanes l where l.conversation_id = owner for update;

    -- Prune may be taking these rows; a deleted message stays closed.
    perform from agent_outbox o join messages m on m.id = o.message_id
    where o.conversation_id = owner and o.turn_id = p_turn and o.status = 'error' and m.deleted_at is null
    order by o.id
    for update of o;
    if not found then
        return 'nothing_to_retry';
    end if;
    if not coalesce(confirm_side_effects, false) and agent_turn_has_side_effect(owner, p_turn) then
        raise exception 'needs_confirmation'
            using errcode = 'OB011', column = 'confirm_side_effects',
                  detail = 'a side effect of this turn may have happened; a retry may double it';
    end if;
    -- A generation that no row has which is free or may become so: the rows form a turn of their own, with an id of its
    -- own, whatever waits beside them, other retried turns included.
    update agent_outbox o
    set status = 'pending', turn_id = null, run_id = null, processed_at = null, attempts = 0,
        generation = 1 + greatest(
            (select max(own.generation) from agent_outbox own
             where own.conversation_id = owner and own.turn_id = p_turn),
            (select max(free.generation) from agent_outbox free
             where free.conversation_id = owner and free.turn_id is null),
            (select max(flying.generation) from agent_outbox flying
             where flying.conversation_id = owner and flying.turn_id = lane.turn_id))
    from messages m
    where m.id = o.message_id and m.deleted_at is null
      and o.conversation_id = owner and o.turn_id = p_turn and o.status = 'error';
    -- Written and not only locked: who decides under an older snapshot, which lacks these rows, then fails (40001).
    update conversations c set last_seq = c.last_seq where c.id = owner;
    if lane.state = 'idle' then
        perform agent_lanes_free(owner);
    end if;
    return 'retried';
end $$;
comment on function retry_turn is
    'Answers a failed turn again, as a turn of its own: retried or nothing_to_retry. Raises turn_not_found, and '
    'needs_confirmation where a side effect may be doubled.';

-- A visible cancellation of a turn that no consumer runs. The caller holds both locks.
create function agent_turn_cancel_unbegun(lane agent_lanes) returns void language plpgsql set search_path from current as $$
declare
    answered bigint;
    next_seq bigint;
begin
    select max(m.seq) into answered
    from agent_outbox o join messages m on m.id = o.message_id
    where o.conversation_id = lane.conversation_id and o.turn_id = lane.turn_id
      and o.status in ('pending', 'processing');
    if answered is not null then
        update agent_outbox o set status = 'error', run_id = lane.run_id, processed_at = clock_timestamp()
        where o.conversation_id = lane.conversation_id and o.turn_id = lane.turn_id
          and o.status in ('pending', 'processing');
        update conversations c
        set last_seq = c.last_seq + 1, unread_count = c.unread_count + 1, last_message_at = clock_timestamp()
        where c.id = lane.conversation_id
        returning c.last_seq into next_seq;
        insert into messages (id, conversation_id, seq, role, content, turn_id, run_id, reply_to_seq, error)
        values (gen_random_uuid()::text, lane.conversation_id, next_seq, 'error', 'This request was cancelled.',
                lane.turn_id, lane.run_id, answered,
                jsonb_build_object(
                    'kind', 'cancelled', 'attempts', lane.attempt, 'exhausted', false,
                    'retryable', not agent_turn_has_side_effect(lane.conversation_id, lane.turn_id),
                    'operations', coalesce((
                        select jsonb_agg(jsonb_build_object(
                            'id', o.id, 'name', o.name, 'effect', o.effect, 'status', o.status,
                            'started_at', o.started_at) order by o.started_at, o.ordinal)
                        from operations o
                        where o.conversation_id = lane.conversation_id and o.turn_id = lane.turn_id
                    ), '[]')));
    end if;
    if lane.run_id is not null then
        insert into agent_runs
            (run_id, turn_id, conversation_id, attempt, worker, claimed_at, started_at, outcome)
        values (lane.run_id, lane.turn_id, lane.conversation_id, lane.attempt, lane.worker, lane.claimed_at,
                lane.started_at, 'cancelled');
    end if;
    perform agent_lanes_free(lane.conversation_id);
end $$;
comment on function agent_turn_cancel_unbegun is 'Writes the cancellation of a waiting or queued turn. Called by cancel_turn and delete_message.';

create function cancel_turn(turn_id uuid) returns text language plpgsql set search_path from current as $$
declare
    p_turn alias for $1;
    owner text := agent_turn_conversation($1);
    lane agent_lanes;
begin
    perform from conversations where id = owner for no key update;
    if not found then
        raise exception 'turn_not_found' using errcode = 'OB010', column = 'turn_id';
    end if;
    select * into lane from agent_lanes l where l.conversation_id = owner and l.turn_id = p_turn for update;
    if not found then
        return 'nothing_to_cancel';
    end if;
    if lane.state = 'running' then
        -- The run's own settle writes the cancellation; a finish of this lane is refused from now on.
        update agent_lanes l set cancel_requested = true where l.conversation_id = owner;
        return 'cancel_requested';
    end if;
    perform agent_turn_cancel_unbegun(lane);
    return 'cancelled';
end $$;
comment on function cancel_turn is
    'Stops a turn: cancelled (it did not run), cancel_requested (its handler is being stopped) or nothing_to_cancel '
    '(it is over). Raises turn_not_found.';

create function mark_read(conversation_id text, up_to_seq bigint) returns int
language plpgsql set search_path from current as $$
declare
    p_conversation alias for $1;
    p_seq alias for $2;
    unread int;
begin
    perform from conversations where id = p_conversation for no key update;
    if not found then
        raise exception 'conversation_not_found' using errcode = 'OB002', column = 'conversation_id';
    end if;
    -- Recounted, never set to zero: an outcome may have come since the user looked.
    update conversations c
    set last_read_seq = greatest(c.last_read_seq, least(coalesce(p_seq, 0), c.last_seq)),
        unread_count = (
            select count(*) from messages m
            where m.conversation_id = p_conversation
              and m.seq > greatest(c.last_read_seq, least(coalesce(p_seq, 0), c.last_seq))
              and m.role <> 'user' and m.deleted_at is null)
    where c.id = p_conversation
    returning c.unread_count into unread;
    return unread;
end $$;
comment on function mark_read is 'Notes that the user has read up to a seq, never less than before; returns what is unread. Raises conversation_not_found.';

create function delete_message(message_id text) returns text language plpgsql set search_path from current as $$
declare
    p_message alias for $1;
    owner text;
    lane agent_lanes;
    own agent_outbox;
begin
    select m.conversation_id into owner from messages m where m.id = p_message;
    perform from conversations where id = owner for no key update;
    if not found then
        raise exception 'message_not_found' using errcode = 'OB012', column = 'message_id';
    end if;
    select * into lane from agent_lanes l where l.conversation_id = owner for update;
    select * into own from agent_outbox o where o.conversation_id = owner and o.message_id = p_message for update;

    update messages m set content = '', deleted_at = clock_timestamp()
    where m.id = p_message and m.deleted_at is null;
    if not found then
        perform from messages m where m.id = p_message;
        if not found then
            raise exception 'message_not_found' using errcode = 'OB012', column = 'message_id';
        end if;
        return 'duplicate';
    end if;
    update conversations c
    set unread_count = (
        select count(*) from messages m
        where m.conversation_id = owner and m.seq > c.last_read_seq and m.role <> 'user' and m.deleted_at is null)
    where c.id = owner;

    if own.status = 'pending' and own.turn_id is null then
        delete from agent_outbox o where o.id = own.id;
        if lane.state = 'waiting' and lane.turn_id is null then
            perform from agent_outbox o where o.conversation_id = owner and o.turn_id is null limit 1;
            if not found then
                perform agent_lanes_free(owner);
            end if;
        end if;
    elsif own.status in ('pending', 'processing') then
        perform agent_turn_drop_message(lane, own.id);
    end if;
    return 'deleted';
end $$;
comment on function delete_message is
    'Leaves a tombstone: content gone, id taken for ever; deleted or duplicate. A pending message leaves its turn; one in '
    'flight ends its turn. Raises message_not_found.';

-- A turn never changes its rows, so one that loses a message ends: its other rows are free again and form a new turn.
-- Not where a side effect may have happened: another turn would do it again, so that turn is cancelled as a whole. Nor
-- where the user has cancelled it: what is cancelled is not answered by another turn.
create function agent_turn_drop_message(lane agent_lanes, dropped bigint) returns void
language plpgsql set search_path from current as $$
begin
    if lane.cancel_requested or agent_turn_has_side_effect(lane.conversation_id, lane.turn_id) then
        if lane.state = 'running' then
            update agent_lanes l set cancel_requested = true where l.conversation_id = lane.conversation_id;
        else
            perform agent_turn_cancel_unbegun(lane);
        end if;
        return;
    end if;
    delete from agent_outbox o where o.id = dropped;
    update agent_outbox o set status = 'pending', turn_id = null, run_id = null, attempts = 0
    where o.conversation_id = lane.conversation_id and o.turn_id = lane.turn_id
      and o.status in ('pending', 'processing');
    if lane.run_id is not null then
        insert into agent_runs
            (run_id, turn_id, conversation_id, attempt, worker, claimed_at, started_at, outcome)
        values (lane.run_id, lane.turn_id, lane.conversation_id, lane.attempt, lane.worker, lane.claimed_at,
                lane.started_at, 'cancelled');
    end if;
    perform agent_lanes_free(lane.conversation_id);
end $$;
comment on function agent_turn_drop_message is 'Takes a deleted message out of the turn in flight. Called by delete_message.';

-- Deletes settled rows, a bounded piece at a time, in the order of their ids: call it with the last id it returned until
-- it returns null. Takes whole turns, so that no part of one can be retried; leaves those that somebody holds. Never
-- touches messages, so a pruned message's id is still taken. The planner sees a page only, never the table.
create function prune_outbox(older_than interval, after_id bigint default 0, batch int default 1000) returns table (last_id bigint, deleted bigint)
language sql set search_path from current
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
    with page as materialized (
        select id from agent_outbox where id > after_id order by id limit batch
    ), turn as materialized (
        select distinct o.turn_id from page join agent_outbox o on o.id = page.id
        where o.status in ('done', 'error') and o.processed_at < clock_timestamp() - older_than
    ), held as materialized (
        select o.id, o.turn_id from turn join agent_outbox o on o.turn_id = turn.turn_id
        where o.status in ('done', 'error') and o.processed_at < clock_timestamp() - older_than
        for update of o skip locked
    ), counted as materialized (
        select id, turn_id, count(*) over (partition by turn_id) as rows from held
    ), gone as (
        delete from agent_outbox o using counted
        where o.id = counted.id
          and counted.rows = (select count(*) from agent_outbox whole where whole.turn_id = counted.turn_id)
        returning 1
    )
    select (select max(id) from page), (select count(*) from gone)
$$;
comment on function prune_outbox is 'Deletes settled outbox rows older than an interval, a page of ids at a time. Called by relay prune.';

-- The same for runs. The attempts of a turn stay as long as its rows do, or it is in flight: they are its history.
create function prune_runs(older_than interval, after_run uuid default '00000000-0000-0000-0000-000000000000', batch int default 1000) returns table (last_run uuid, deleted bigint)
language sql set search_path from current
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
    with page as materialized (
        select run_id from agent_runs where run_id > after_run order by run_id limit batch
    ), held as materialized (
        select r.run_id from page join agent_runs r on r.run_id = page.run_id
        where r.ended_at < clock_timestamp() - older_than
          and not exists (select from agent_outbox o where o.turn_id = r.turn_id)
          and not exists (
              select from agent_lanes l where l.conversation_id = r.conversation_id and l.turn_id = r.turn_id)
        for update of r skip locked
    ), gone as (
        delete from agent_runs r using held where r.run_id = held.run_id returning 1
    )
    select (select run_id from page order by run_id desc limit 1), (select count(*) from gone)
$$;
comment on function prune_runs is 'Deletes ended runs older than an interval, a page of ids at a time. Called by relay prune.';
