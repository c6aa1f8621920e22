ALTER TABLE policy DROP COLUMN two_person_rule_off_reason;
ALTER TABLE policy DROP COLUMN two_person_rule_off_by;
ALTER TABLE policy DROP COLUMN two_person_rule_off_at;
ALTER TABLE policy DROP COLUMN two_person_rule_requested_by;
ALTER TABLE policy DROP COLUMN two_person_rule_on_at;
