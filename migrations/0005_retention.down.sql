DROP INDEX machine_due_next;
CREATE INDEX machine_due_next ON machine_due (process, ready_at)
    WHERE lease_session IS NULL AND process IS NOT NULL;
DROP INDEX intent_settled;
DROP INDEX history_by_age;
