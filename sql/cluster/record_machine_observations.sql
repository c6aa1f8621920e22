-- Record what a pass observed of each machine, and of its node if the curators answered.
UPDATE machine_cluster c SET wait_reason = n.wait_reason,
    node_id = CASE WHEN $2::TIMESTAMPTZ IS NOT NULL THEN n.node_id ELSE c.node_id END,
    node_state = CASE WHEN $2::TIMESTAMPTZ IS NOT NULL THEN n.node_state ELSE c.node_state END,
    roles = CASE WHEN $2::TIMESTAMPTZ IS NOT NULL THEN n.roles ELSE c.roles END,
    health = CASE WHEN $2::TIMESTAMPTZ IS NOT NULL THEN n.health ELSE c.health END,
    voter = CASE WHEN $2::TIMESTAMPTZ IS NOT NULL THEN n.voter ELSE c.voter END,
    services = CASE WHEN $2::TIMESTAMPTZ IS NOT NULL THEN n.services ELSE c.services END,
    kubernetes = CASE WHEN $2::TIMESTAMPTZ IS NOT NULL THEN n.kubernetes ELSE c.kubernetes END,
    observed_at = COALESCE($2::TIMESTAMPTZ, c.observed_at)
FROM unnest($3::UUID[], $4::TEXT[], $5::TEXT[], $6::TEXT[], $7::JSONB[], $8::TEXT[], $9::BOOL[], $10::JSONB[],
            $11::JSONB[])
    AS n (machine_id, wait_reason, node_id, node_state, roles, health, voter, services, kubernetes)
WHERE c.machine_id = n.machine_id AND c.cluster_id = $1
