-- When the two-person rule was switched on: the admins of that moment approve without a waiting time. NULL: it is off,
-- or an earlier release switched it on.
ALTER TABLE policy ADD COLUMN two_person_rule_on_at TIMESTAMPTZ;
-- The last flag that could not switch the rule on, because there were fewer than two admins. NULL: there is none, or
-- the rule was switched since.
ALTER TABLE policy ADD COLUMN two_person_rule_requested_by TEXT;
-- The last time that the rule was switched off, on a host that reaches the database.
ALTER TABLE policy ADD COLUMN two_person_rule_off_at TIMESTAMPTZ;
ALTER TABLE policy ADD COLUMN two_person_rule_off_by TEXT;
ALTER TABLE policy ADD COLUMN two_person_rule_off_reason TEXT;
