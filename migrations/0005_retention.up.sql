-- What time makes grow, and what grows under somebody's long snapshot. The tables may be large: no time
-- limit of a connection ends this in the middle.
SET LOCAL statement_timeout = 0;

-- How retention finds what is old.
CREATE INDEX history_by_age ON history (at);
CREATE INDEX intent_settled ON intent (settled_at) WHERE settled_at IS NOT NULL;

-- For the probe alone, which says `bucket >= 0`. A claim does not, and so cannot go by this index: where
-- few machines were due when the planner last looked, it took either for as good, and read for each of
-- its classes the dead entries of all. A shepherd of the release before finds its probe slower meanwhile.
DROP INDEX machine_due_next;
CREATE INDEX machine_due_next ON machine_due (process, ready_at)
    WHERE lease_session IS NULL AND process IS NOT NULL AND bucket >= 0;
