-- Count the rows that contradict an invariant of the engine, by invariant: each count is 0 while no shepherd is at work, and
-- but for an instant while one is.
select 'work without lease' as check, count(*) from work w left join machine_due d using (machine_id, lane) where d.lease_session is distinct from w.session_id or d.fence<>w.fence
union all select 'lease without work', count(*) from machine_due d left join work w using (machine_id, lane) where d.lease_session is not null and w.session_id is null
union all select 'work of a closed session', count(*) from work w join session s using (session_id) where s.closed_at is not null
union all select 'work of an unknown session', count(*) from work w left join session s using (session_id) where s.session_id is null
union all select 'start without end, not live', count(*) from history h where edge='start' and not exists (select 1 from history e where e.machine_id=h.machine_id and e.lane=h.lane and e.fence=h.fence and e.edge='end') and not exists (select 1 from work w where w.machine_id=h.machine_id and w.lane=h.lane and w.fence=h.fence)
union all select 'end without start', count(*) from history h where edge='end' and not exists (select 1 from history e where e.machine_id=h.machine_id and e.lane=h.lane and e.fence=h.fence and e.edge='start')
union all select 'overlap in history', count(*) from (select s.machine_id, s.lane, s.fence, s.at, lag(e.at) over (partition by s.machine_id, s.lane order by s.fence) as prev_end from history s left join history e on e.machine_id=s.machine_id and e.lane=s.lane and e.fence=s.fence and e.edge='end' where s.edge='start') x where prev_end is not null and at < prev_end
union all select 'end before its start', count(*) from history s join history e using (machine_id, lane, fence) where s.edge='start' and e.edge='end' and e.at < s.at
union all select 'fence gaps (start skipped)', count(*) from (select machine_id, lane, fence, lag(fence) over (partition by machine_id, lane order by fence) p from history where edge='start') x where p is not null and fence <> p+1
union all select 'open sessions past deadline by 5 s', count(*) from session where closed_at is null and deadline < clock_timestamp() - interval '5 s'
union all select 'named lease of closed session', count(*) from named_lease l join session s on s.session_id=l.lease_session where s.closed_at is not null
union all select 'two machines of one provider id', count(*) from (select provider, provider_id from machine_provided group by 1,2 having count(*)>1) x
union all select 'effect after session closed (ended in history by a Finish after close)', count(*) from history h join session s using (session_id) where h.edge='end' and h.event in ('Finished','Failed','PutOff') and h.at > s.closed_at
union all select 'open intents of closed sessions', count(*) from intent i join session s using (session_id) where i.settled_at is null and s.closed_at < clock_timestamp() - interval '10 s' and i.machine_id is not null;
