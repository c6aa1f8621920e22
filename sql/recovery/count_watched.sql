-- Machines whose agent we expect to hear, by provider.
SELECT provider, count(*) AS "count!" FROM machine_due
WHERE lane = 'access' AND phase_index IN ('AgentStarting', 'Ready', 'Installing', 'Silent', 'Recovering')
GROUP BY provider
