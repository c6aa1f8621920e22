-- Count the machines whose agent is expected to report, by provider.
SELECT provider, count(*) AS "count!" FROM machine_due
WHERE lane = 'access' AND phase_index IN ('AgentStarting', 'Ready', 'Installing', 'Silent', 'Recovering')
GROUP BY provider
