-- Insert a named lease whose row is locked while a budget is counted and used.
INSERT INTO named_lease (kind, name, fence) VALUES ('budget', $1, 0) ON CONFLICT (kind, name) DO NOTHING
