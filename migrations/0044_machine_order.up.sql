-- The order of lists of machines: by provider, then by the provider's id with numbers by value (`sim-2` before `sim-10`),
-- then by UUID. So each number in an id is written with 20 digits at least, and the texts are compared byte by byte. The
-- first 100 characters decide: with more, an id of many numbers would not fit into a row of the index.
--
-- Statements that list in this order repeat the expression. `natural_key` in crates/model makes the same text.
CREATE INDEX machine_provided_order ON machine_provided (provider, (regexp_replace(regexp_replace(left(provider_id, 100),
    '([0-9]+)', '00000000000000000000\1', 'g'), '0*([0-9]{20,})', '\1', 'g') COLLATE "C"), machine_id);
