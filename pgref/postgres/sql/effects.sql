-- The side-effect gate. Every contract method is one function: one round trip, one transaction.
-- Created under the search_path of its own schema, which each function pins (SET search_path FROM CURRENT).
--
-- Derived holding: a resource is held exactly while the action of its newest grant is in flight or uncertain,
-- was not released, and its lease has not expired. So finishing an effect is an update of one row.
--
-- Locks: resource row, then action rows in key order. The clock is read after the locks, and judging stands in a
-- later statement than the lock: a statement that had to wait judges other tables by its old snapshot.
-- Whoever waits for a lock longer than lock_timeout is told so (55P03), before its client gives up waiting for the
-- answer: a session that is stuck with a row does not pile up others behind it. Set by the function, it needs no
-- statement of its own, holds under a pooler, and ends with the function inside a user's transaction.
--
-- State: 0 free, 1 in flight, 2 uncertain, 3 done.

CREATE OR REPLACE FUNCTION effect_is_held(a effect_action, r effect_resource) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN a.state IN (1, 2) AND NOT a.released AND a.fence = r.granted_fence AND a.resource = r.resource;


-- Turn an intent that the caller has locked and found expired into an uncertain one (G3, G21).
CREATE OR REPLACE FUNCTION effect_flip(p_key text, p_now timestamptz) RETURNS void
LANGUAGE sql SET search_path FROM CURRENT
BEGIN ATOMIC
  UPDATE effect_action SET state = 2, expired = true, reason = 'lease expired', uncertain_at = p_now WHERE key = p_key AND state = 1;
  INSERT INTO effect_history (key, at, event, fence, "by", why)
    SELECT key, p_now, 'expired', fence, 'store', reason FROM effect_action WHERE key = p_key;
END;


-- done > uncertain > in flight > contended > grant. The first look takes no lock and writes nothing (G1-G9, G22, G23).
CREATE OR REPLACE FUNCTION effect_acquire(
  p_key text, p_resource text, p_fingerprint text, p_retry_safe boolean, p_payload text,
  p_holder uuid, p_ttl interval, p_now timestamptz DEFAULT NULL
) RETURNS effect_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  a effect_action;
  t timestamptz;
  v effect_answer;
  v_fence bigint;
  v_granted bigint;
  v_rival text;
  v_until timestamptz;
  v_looked boolean := false;
BEGIN
  LOOP
    SELECT * INTO a FROM effect_action WHERE key = p_key;
    t := coalesce(p_now, clock_timestamp());
    IF FOUND THEN
      IF a.fingerprint <> p_fingerprint THEN
        v.verdict := 'fingerprint_mismatch';
        RETURN v;
      ELSIF a.state = 3 THEN
        v.verdict := 'done'; v.value := a.result;
        RETURN v;
      ELSIF a.state = 2 THEN
        v.verdict := 'uncertain'; v.value := a.reason; v.at := a.uncertain_at;
        RETURN v;
      ELSIF a.state = 1 AND t >= a.expires_at THEN
        SELECT * INTO a FROM effect_action WHERE key = p_key FOR UPDATE;
        t := coalesce(p_now, clock_timestamp());
        IF a.state = 1 AND t >= a.expires_at THEN
          PERFORM effect_flip(p_key, t);
        END IF;
        CONTINUE;
      ELSIF a.state = 1 AND a.holder = p_holder AND a.resource = p_resource THEN
        v.verdict := 'granted'; v.fence := a.fence; v.at := a.expires_at; v.attempt := a.attempt;
        RETURN v;
      ELSIF a.state = 1 THEN
        v.verdict := 'in_flight'; v.seconds := extract(epoch FROM a.expires_at - t);
        RETURN v;
      END IF;
    END IF;

    -- A new key that is its own resource is nearly always the first on it: then the look at the resource is spared.
    IF v_looked OR a.attempt IS NOT NULL OR p_resource <> p_key THEN
      SELECT r.fence, r.granted_fence, h.key, h.expires_at INTO v_fence, v_granted, v_rival, v_until
        FROM effect_resource r
        LEFT JOIN effect_action h ON h.key = r.action_key AND h.key <> p_key
          AND h.state IN (1, 2) AND NOT h.released AND h.fence = r.granted_fence AND h.resource = r.resource
        WHERE r.resource = p_resource;
      IF t < v_until THEN
        v.verdict := 'contended'; v.seconds := extract(epoch FROM v_until - t);
        RETURN v;
      END IF;
    END IF;
    v_looked := true;

    -- Nothing speaks against a grant: lock, and look again if anything has moved since.
    IF v_fence IS NULL AND a.attempt IS NULL THEN
      INSERT INTO effect_resource (resource, fence, granted_fence, action_key)
        SELECT p_resource, fence_floor + 1, fence_floor + 1, p_key FROM effect_store
        ON CONFLICT DO NOTHING RETURNING fence INTO v.fence;
      CONTINUE WHEN NOT FOUND;
      INSERT INTO effect_action (
          key, resource, fingerprint, retry_safe, payload, state, attempt, fence, holder, created_at, granted_at, expires_at)
        VALUES (p_key, p_resource, p_fingerprint, p_retry_safe, p_payload, 1, 1, v.fence, p_holder, t, t, t + p_ttl)
        ON CONFLICT DO NOTHING;
      IF NOT FOUND THEN
        -- The same key was granted on another resource meanwhile: ours was made for nothing.
        DELETE FROM effect_resource WHERE resource = p_resource AND fence = v.fence;
        CONTINUE;
      END IF;
      v.attempt := 1;
    ELSE
      IF v_fence IS NULL THEN
        INSERT INTO effect_resource (resource, fence, granted_fence, action_key)
          SELECT p_resource, fence_floor, fence_floor, '' FROM effect_store ON CONFLICT DO NOTHING;
        CONTINUE;
      END IF;
      PERFORM FROM effect_resource
        WHERE resource = p_resource AND fence = v_fence AND granted_fence = v_granted FOR UPDATE;
      CONTINUE WHEN NOT FOUND;
      IF v_rival IS NOT NULL OR a.attempt IS NOT NULL THEN
        PERFORM FROM effect_action WHERE key IN (p_key, v_rival) ORDER BY key FOR UPDATE;
      END IF;
      t := coalesce(p_now, clock_timestamp());
      v.attempt := a.attempt;
      IF v_rival IS NOT NULL THEN
        SELECT * INTO a FROM effect_action WHERE key = v_rival;
        IF a.state IN (1, 2) AND NOT a.released AND a.fence = v_granted AND a.resource = p_resource THEN
          CONTINUE WHEN t < a.expires_at;
          IF a.state = 1 THEN
            PERFORM effect_flip(v_rival, t);
          END IF;
        END IF;
      END IF;
      v.fence := v_fence + 1;
      IF v.attempt IS NULL THEN
        INSERT INTO effect_action (
            key, resource, fingerprint, retry_safe, payload, state, attempt, fence, holder, created_at, granted_at, expires_at)
          VALUES (p_key, p_resource, p_fingerprint, p_retry_safe, p_payload, 1, 1, v.fence, p_holder, t, t, t + p_ttl)
          ON CONFLICT DO NOTHING;
      ELSE
        UPDATE effect_action SET
          resource = p_resource, fingerprint = p_fingerprint, retry_safe = p_retry_safe, payload = p_payload,
          state = 1, attempt = v.attempt + 1, fence = v.fence, holder = p_holder, granted_at = t, expires_at = t + p_ttl,
          released = false, expired = false, ruling = NULL, due_at = NULL
        WHERE key = p_key AND state = 0 AND attempt = v.attempt;
      END IF;
      CONTINUE WHEN NOT FOUND;
      UPDATE effect_resource SET fence = v.fence, granted_fence = v.fence, action_key = p_key
        WHERE resource = p_resource AND fence = v_fence;
      v.attempt := coalesce(v.attempt, 0) + 1;
    END IF;

    -- An insert can wait for a rival that then rolls back: the lease runs from after that.
    IF p_now IS NULL AND clock_timestamp() > t + interval '10 milliseconds' THEN
      t := clock_timestamp();
      UPDATE effect_action SET granted_at = t, expires_at = t + p_ttl
        WHERE key = p_key AND fence = v.fence AND holder = p_holder AND state = 1;
    END IF;
    v.verdict := 'granted'; v.at := t + p_ttl;
    RETURN v;
  END LOOP;
END $$;


-- What acquire would say of each, as of p_now and of the caller's snapshot; NULL where nothing speaks against a grant.
CREATE OR REPLACE FUNCTION effect_judge_many(
  p_keys text[], p_resources text[], p_fingerprints text[], p_holders uuid[], p_now timestamptz
) RETURNS TABLE (ordinal bigint, verdict text, fence bigint, at timestamptz, attempt integer, value text, seconds double precision)
LANGUAGE sql STABLE SET search_path FROM CURRENT
BEGIN ATOMIC
  SELECT u.ordinal,
    CASE
      WHEN a.fingerprint <> u.fingerprint THEN 'fingerprint_mismatch'
      WHEN a.state = 3 THEN 'done'
      WHEN a.state = 2 THEN 'uncertain'
      WHEN a.state = 1 AND p_now >= a.expires_at THEN 'expired'
      WHEN a.state = 1 AND a.holder = u.holder AND a.resource = u.resource THEN 'granted'
      WHEN a.state = 1 THEN 'in_flight'
      WHEN effect_is_held(h, r) AND p_now < h.expires_at THEN 'contended'
    END,
    a.fence,
    CASE a.state WHEN 1 THEN a.expires_at ELSE a.uncertain_at END,
    a.attempt,
    CASE a.state WHEN 3 THEN a.result ELSE a.reason END,
    extract(epoch FROM CASE a.state WHEN 1 THEN a.expires_at ELSE h.expires_at END - p_now)::double precision
  FROM unnest(p_keys, p_resources, p_fingerprints, p_holders) WITH ORDINALITY
    AS u (key, resource, fingerprint, holder, ordinal)
  LEFT JOIN effect_action a ON a.key = u.key
  LEFT JOIN effect_resource r ON r.resource = u.resource
  LEFT JOIN effect_action h ON h.key = r.action_key AND h.key <> u.key;
END;


-- Many at once, the keys distinct. The first asked of one resource gets it. 'again': ask for it alone.
-- A batch of new keys on new resources, each on its own, is written at once. Else: look first; lock the resources and then
-- the actions of what may be granted, each in its own order; judge again and write.
CREATE OR REPLACE FUNCTION effect_acquire_many(
  p_keys text[], p_resources text[], p_fingerprints text[], p_retry_safe boolean[], p_payloads text[],
  p_holders uuid[], p_ttl interval, p_now timestamptz DEFAULT NULL
) RETURNS TABLE (ordinal bigint, verdict text, fence bigint, at timestamptz, attempt integer, value text, seconds double precision)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := coalesce(p_now, clock_timestamp());
  v_new boolean;
  v_open bigint[];
  v_asked bigint[];
  v_answers effect_answer[];
  v_unused text[];
  v_late timestamptz;
BEGIN
  SELECT bool_and(a.key IS NULL AND r.resource IS NULL) AND count(DISTINCT u.resource) = cardinality(p_resources) INTO v_new
    FROM unnest(p_keys, p_resources) u (key, resource)
    LEFT JOIN effect_action a ON a.key = u.key
    LEFT JOIN effect_resource r ON r.resource = u.resource;

  IF v_new THEN
    WITH asked AS MATERIALIZED (
      SELECT * FROM unnest(p_keys, p_resources, p_fingerprints, p_retry_safe, p_payloads, p_holders) WITH ORDINALITY
        u (key, resource, fingerprint, retry_safe, payload, holder, ordinal)
    ), made AS (
      INSERT INTO effect_resource (resource, fence, granted_fence, action_key)
        SELECT resource, fence_floor + 1, fence_floor + 1, key FROM asked, effect_store ORDER BY resource
        ON CONFLICT DO NOTHING RETURNING fence, resource, action_key
    ), granted AS (
      INSERT INTO effect_action (
          key, resource, fingerprint, retry_safe, payload, state, attempt, fence, holder, created_at, granted_at, expires_at)
        SELECT u.key, u.resource, u.fingerprint, u.retry_safe, u.payload, 1, 1, m.fence, u.holder, t, t, t + p_ttl
          FROM asked u JOIN made m ON m.action_key = u.key ORDER BY u.key
        ON CONFLICT DO NOTHING RETURNING fence, key
    )
    SELECT array_agg(u.ordinal),
        array_agg(ROW(CASE WHEN g.key IS NULL THEN 'again' ELSE 'granted' END, g.fence, t + p_ttl, 1, NULL, NULL)::effect_answer),
        array_agg(m.resource) FILTER (WHERE g.key IS NULL AND m.resource IS NOT NULL)
      INTO v_asked, v_answers, v_unused
      FROM asked u LEFT JOIN made m ON m.action_key = u.key LEFT JOIN granted g ON g.key = u.key;
    IF v_unused IS NOT NULL THEN
      -- The same key was granted on another resource meanwhile: ours was made for nothing.
      DELETE FROM effect_resource WHERE resource = ANY (v_unused);
    END IF;
  ELSE
    SELECT array_agg(j.ordinal) INTO v_open FROM effect_judge_many(p_keys, p_resources, p_fingerprints, p_holders, t) j
      WHERE j.verdict = 'expired' OR j.verdict IS NULL;
    IF coalesce(cardinality(v_open), 0) < cardinality(p_keys) THEN
      -- A later snapshot than that of the first look: what was refused there can be open here.
      RETURN QUERY
        SELECT j.ordinal, CASE WHEN j.verdict = 'expired' THEN 'again' ELSE coalesce(j.verdict, 'again') END,
            j.fence, j.at, j.attempt, j.value, j.seconds
          FROM effect_judge_many(p_keys, p_resources, p_fingerprints, p_holders, t) j
          WHERE NOT EXISTS (SELECT FROM unnest(v_open) o WHERE o = j.ordinal);
    END IF;
    IF v_open IS NULL THEN
      RETURN;
    END IF;

    INSERT INTO effect_resource (resource, fence, granted_fence, action_key)
      SELECT DISTINCT u.resource, s.fence_floor, 0, '' FROM unnest(p_resources) WITH ORDINALITY u (resource, ordinal)
        JOIN unnest(v_open) o ON o = u.ordinal CROSS JOIN effect_store s
        WHERE NOT EXISTS (SELECT FROM effect_resource r WHERE r.resource = u.resource) ORDER BY 1
      ON CONFLICT DO NOTHING;
    PERFORM FROM effect_resource WHERE resource IN (
        SELECT u.resource FROM unnest(p_resources) WITH ORDINALITY u (resource, ordinal) JOIN unnest(v_open) o ON o = u.ordinal)
      ORDER BY resource FOR UPDATE;
    PERFORM FROM effect_action WHERE key IN (
        SELECT u.key FROM unnest(p_keys) WITH ORDINALITY u (key, ordinal) JOIN unnest(v_open) o ON o = u.ordinal
        UNION ALL
        SELECT r.action_key FROM unnest(p_resources) WITH ORDINALITY u (resource, ordinal)
          JOIN unnest(v_open) o ON o = u.ordinal JOIN effect_resource r ON r.resource = u.resource)
      ORDER BY key FOR UPDATE;
    t := coalesce(p_now, clock_timestamp());

    WITH asked AS (
      SELECT u.* FROM unnest(p_keys, p_resources) WITH ORDINALITY u (key, resource, ordinal) JOIN unnest(v_open) o ON o = u.ordinal
    ), expired AS (
      SELECT a.key FROM asked u JOIN effect_action a ON a.key = u.key WHERE a.state = 1 AND t >= a.expires_at
      UNION
      SELECT h.key FROM asked u JOIN effect_resource r ON r.resource = u.resource
        JOIN effect_action h ON h.key = r.action_key
        LEFT JOIN effect_action a ON a.key = u.key
        WHERE h.state = 1 AND t >= h.expires_at AND effect_is_held(h, r) AND coalesce(a.state, 0) = 0
    ), flipped AS (
      UPDATE effect_action a SET state = 2, expired = true, reason = 'lease expired', uncertain_at = t
        FROM expired e WHERE a.key = e.key AND a.state = 1 RETURNING a.key, a.fence
    )
    INSERT INTO effect_history (key, at, event, fence, "by", why)
      SELECT key, t, 'expired', fence, 'store', 'lease expired' FROM flipped;

    WITH judged AS (
      SELECT u.*, j.verdict, j.fence, j.at, j.attempt, j.value, j.seconds,
          row_number() OVER (PARTITION BY j.verdict IS NULL, u.resource ORDER BY u.ordinal) = 1 AS first
        FROM effect_judge_many(p_keys, p_resources, p_fingerprints, p_holders, t) j
        JOIN unnest(v_open) o ON o = j.ordinal
        JOIN unnest(p_keys, p_resources, p_fingerprints, p_retry_safe, p_payloads, p_holders) WITH ORDINALITY
          u (key, resource, fingerprint, retry_safe, payload, holder, ordinal) ON u.ordinal = o
    ), chosen AS (
      SELECT j.*, r.fence + 1 AS new_fence FROM judged j JOIN effect_resource r ON r.resource = j.resource
        WHERE j.verdict IS NULL AND j.first
    ), made AS (
      INSERT INTO effect_action (
          key, resource, fingerprint, retry_safe, payload, state, attempt, fence, holder, created_at, granted_at, expires_at)
        SELECT key, resource, fingerprint, retry_safe, payload, 1, 1, new_fence, holder, t, t, t + p_ttl
          FROM chosen WHERE attempt IS NULL ORDER BY key
        ON CONFLICT DO NOTHING
        RETURNING key
    ), granted_again AS (
      UPDATE effect_action a SET
          resource = c.resource, fingerprint = c.fingerprint, retry_safe = c.retry_safe,
          payload = c.payload, state = 1, attempt = a.attempt + 1, fence = c.new_fence, holder = c.holder,
          granted_at = t, expires_at = t + p_ttl, released = false, expired = false, ruling = NULL, due_at = NULL
        FROM chosen c WHERE a.key = c.key AND a.state = 0 AND a.attempt = c.attempt
        RETURNING a.key
    ), granted AS (
      SELECT c.* FROM chosen c WHERE c.key IN (SELECT key FROM made UNION ALL SELECT key FROM granted_again)
    ), taken AS (
      UPDATE effect_resource r SET fence = g.new_fence, granted_fence = g.new_fence, action_key = g.key
        FROM granted g WHERE r.resource = g.resource AND r.fence = g.new_fence - 1
        RETURNING r.resource
    )
    SELECT array_agg(j.ordinal), array_agg(ROW(
        CASE WHEN j.verdict IS NOT NULL THEN j.verdict WHEN g.key IS NOT NULL THEN 'granted'
          WHEN j.resource IN (SELECT resource FROM granted) THEN 'contended' ELSE 'again' END,
        coalesce(g.new_fence, j.fence),
        CASE WHEN g.key IS NULL THEN j.at ELSE t + p_ttl END,
        CASE WHEN g.key IS NULL THEN j.attempt ELSE coalesce(g.attempt, 0) + 1 END,
        j.value,
        CASE WHEN j.verdict IS NULL THEN extract(epoch FROM p_ttl)::double precision ELSE j.seconds END)::effect_answer)
      INTO v_asked, v_answers
      FROM judged j LEFT JOIN granted g ON g.ordinal = j.ordinal;
  END IF;

  -- An insert can wait for a rival that then rolls back: the leases run from after that. A large batch takes its time.
  IF p_now IS NULL AND clock_timestamp() > t + interval '10 milliseconds' + cardinality(p_keys) * interval '0.2 milliseconds' THEN
    v_late := clock_timestamp();
    UPDATE effect_action a SET granted_at = v_late, expires_at = v_late + p_ttl
      FROM unnest(p_keys, p_holders) u (key, holder)
      WHERE a.key = u.key AND a.holder = u.holder AND a.state = 1 AND a.granted_at = t;
  END IF;
  RETURN QUERY
    SELECT x.asked, x.verdict, x.fence,
        CASE WHEN v_late IS NOT NULL AND x.verdict = 'granted' AND x.at = t + p_ttl THEN v_late + p_ttl ELSE x.at END,
        x.attempt, x.value, x.seconds
      FROM unnest(v_asked, v_answers) x (asked, verdict, fence, at, attempt, value, seconds);
END $$;


-- What a lease is worth: NULL if it is that of the attempt in `a` and the newest of its resource `r` (G9, G11).
CREATE OR REPLACE FUNCTION effect_lease_fault(
  a effect_action, r effect_resource, p_fingerprint text, p_lease_resource text, p_resource text, p_fence bigint, p_holder uuid
) RETURNS text
LANGUAGE sql IMMUTABLE
RETURN CASE
  WHEN a.fingerprint <> p_fingerprint THEN 'fingerprint_mismatch'
  WHEN p_lease_resource <> p_resource THEN 'resource_mismatch'
  WHEN r.granted_fence IS DISTINCT FROM p_fence THEN 'fence_stale'
  WHEN (a.fence, a.holder, a.resource) IS DISTINCT FROM (p_fence, p_holder, p_resource) THEN 'not_holder'
END;


-- The same for methods that the intent alone authorises, also after the resource has changed hands (G15).
CREATE OR REPLACE FUNCTION effect_intent_fault(
  a effect_action, p_fingerprint text, p_lease_resource text, p_resource text, p_fence bigint, p_holder uuid
) RETURNS text
LANGUAGE sql IMMUTABLE
RETURN CASE
  WHEN a.fingerprint <> p_fingerprint THEN 'fingerprint_mismatch'
  WHEN p_lease_resource <> p_resource THEN 'resource_mismatch'
  WHEN p_fence < a.fence THEN 'fence_stale'
  WHEN (a.fence, a.holder, a.resource) IS DISTINCT FROM (p_fence, p_holder, p_resource) THEN 'not_holder'
END;


-- First wins (G12, G16). 'completed' = by this call, 'done' = before it. A refused completion is kept (G17).
CREATE OR REPLACE FUNCTION effect_complete(
  p_key text, p_resource text, p_fingerprint text, p_lease_resource text, p_fence bigint, p_holder uuid,
  p_result text, p_now timestamptz DEFAULT NULL
) RETURNS effect_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  a effect_action;
  r effect_resource;
  t timestamptz;
  v effect_answer;
BEGIN
  -- An intent in flight and not released is the newest grant of its resource, since a takeover turns it uncertain.
  UPDATE effect_action SET state = 3, result = p_result, completed_at = coalesce(p_now, clock_timestamp())
    WHERE key = p_key AND state = 1 AND NOT released AND fence = p_fence AND holder = p_holder
      AND resource = p_resource AND resource = p_lease_resource AND (fingerprint = p_fingerprint) IS NOT FALSE;
  IF FOUND THEN
    v.verdict := 'completed'; v.value := p_result;
    RETURN v;
  END IF;

  SELECT * INTO a FROM effect_action WHERE key = p_key;
  IF a.state IS DISTINCT FROM 3 THEN
    SELECT * INTO r FROM effect_resource WHERE resource = p_resource FOR UPDATE;
    SELECT * INTO a FROM effect_action WHERE key = p_key FOR UPDATE;
  END IF;
  t := coalesce(p_now, clock_timestamp());
  IF a.state = 3 AND (a.fingerprint = p_fingerprint) IS NOT FALSE THEN
    v.verdict := 'done'; v.value := a.result;
    RETURN v;
  END IF;
  v.verdict := effect_lease_fault(a, r, p_fingerprint, p_lease_resource, p_resource, p_fence, p_holder);
  v.fence := r.granted_fence;
  IF v.verdict IS NULL AND (a.state = 1 OR a.state = 2 AND a.expired) THEN
    UPDATE effect_action SET
      state = 3, result = p_result, completed_at = t, uncertain_at = NULL, expired = false, reason = NULL,
      reconciler = NULL, reconcile_fence = NULL, reconcile_expires_at = NULL, looks = 0, parked = false, note = NULL
      WHERE key = p_key AND fence = p_fence AND holder = p_holder;
    IF a.state = 2 THEN
      INSERT INTO effect_history (key, at, event, fence, "by", why) VALUES (p_key, t, 'completed_late', p_fence, 'holder', '');
    END IF;
    v.verdict := 'completed'; v.value := p_result;
    RETURN v;
  END IF;
  v.verdict := coalesce(v.verdict, 'lease_lost');
  IF a.key IS NOT NULL AND v.verdict <> 'fingerprint_mismatch' THEN
    INSERT INTO effect_evidence (key, fence, holder, at, result) VALUES (p_key, p_fence, p_holder, t, p_result)
      ON CONFLICT DO NOTHING;
  END IF;
  RETURN v;
END $$;


-- Many at once. What is not the plain completion of an attempt in flight is answered 'again': ask for it alone.
CREATE OR REPLACE FUNCTION effect_complete_many(
  p_keys text[], p_resources text[], p_fingerprints text[], p_lease_resources text[], p_fences bigint[], p_holders uuid[],
  p_results text[], p_now timestamptz DEFAULT NULL
) RETURNS TABLE (ordinal bigint, verdict text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
#variable_conflict use_column
BEGIN
  PERFORM FROM effect_action WHERE key = ANY (p_keys) ORDER BY key FOR UPDATE;
  RETURN QUERY
    WITH asked AS (
      SELECT * FROM unnest(p_keys, p_resources, p_fingerprints, p_lease_resources, p_fences, p_holders, p_results)
        WITH ORDINALITY AS u (key, resource, fingerprint, lease_resource, fence, holder, result, ordinal)
    ), completed AS (
      UPDATE effect_action a SET state = 3, result = u.result, completed_at = coalesce(p_now, clock_timestamp())
        FROM asked u
        WHERE a.key = u.key AND a.state = 1 AND NOT a.released AND a.fence = u.fence AND a.holder = u.holder
          AND a.resource = u.resource AND u.resource = u.lease_resource AND (a.fingerprint = u.fingerprint) IS NOT FALSE
        RETURNING a.key
    )
    SELECT u.ordinal, CASE WHEN c.key IS NULL THEN 'again' ELSE 'completed' END
      FROM asked u LEFT JOIN completed c ON c.key = u.key;
END $$;


-- Complete inside the transaction that carries the effect itself: anything but a completion by this very call must
-- undo that transaction, so it raises (SQLSTATE PGR01, the verdict as detail).
CREATE OR REPLACE FUNCTION effect_complete_here(
  p_key text, p_resource text, p_fingerprint text, p_lease_resource text, p_fence bigint, p_holder uuid,
  p_result text, p_now timestamptz DEFAULT NULL
) RETURNS effect_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  v effect_answer;
BEGIN
  v := effect_complete(p_key, p_resource, p_fingerprint, p_lease_resource, p_fence, p_holder, p_result, p_now);
  IF v.verdict <> 'completed' THEN
    RAISE EXCEPTION USING MESSAGE = 'completion refused: ' || p_key, DETAIL = v.verdict, ERRCODE = 'PGR01';
  END IF;
  RETURN v;
END $$;


-- Want a key that nobody has been granted yet: a row that claim_due will find, in the transaction of whoever wants it.
-- A key that is known keeps its state; one that is free becomes due.
CREATE OR REPLACE FUNCTION effect_accept_here(
  p_key text, p_resource text, p_fingerprint text, p_retry_safe boolean, p_payload text, p_now timestamptz DEFAULT NULL
) RETURNS effect_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  a effect_action;
  t timestamptz := coalesce(p_now, clock_timestamp());
  v effect_answer;
BEGIN
  v.verdict := 'accepted';
  INSERT INTO effect_action (
      key, resource, fingerprint, retry_safe, payload, state, attempt, fence, holder, created_at, granted_at, expires_at, due_at)
    VALUES (p_key, p_resource, p_fingerprint, p_retry_safe, p_payload, 0, 0, 0, gen_random_uuid(), t, t, t, t)
    ON CONFLICT DO NOTHING;
  IF NOT FOUND THEN
    SELECT * INTO a FROM effect_action WHERE key = p_key FOR UPDATE;
    IF a.fingerprint <> p_fingerprint THEN
      v.verdict := 'fingerprint_mismatch';
    ELSIF a.state = 0 THEN
      UPDATE effect_action SET
          resource = p_resource, fingerprint = p_fingerprint, retry_safe = p_retry_safe, payload = p_payload,
          due_at = least(due_at, t)
        WHERE key = p_key AND state = 0;
    END IF;
  END IF;
  RETURN v;
END $$;


-- The single-commit form: judge at the start of the transaction that carries the effect, grant and complete at its end.
-- Between them no row is locked or written. The advisory locks tell a second one at once; whoever takes the ordinary
-- way meanwhile wins. A fence handed out here counts only once it is committed.
CREATE OR REPLACE FUNCTION effect_acquire_here(
  p_key text, p_resource text, p_fingerprint text, p_now timestamptz DEFAULT NULL
) RETURNS effect_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  a effect_action;
  r effect_resource;
  h effect_action;
  t timestamptz;
  v effect_answer;
  v_locked boolean := false;
BEGIN
  LOOP
    SELECT * INTO a FROM effect_action WHERE key = p_key;
    t := coalesce(p_now, clock_timestamp());
    IF a.fingerprint <> p_fingerprint THEN
      v.verdict := 'fingerprint_mismatch';
      RETURN v;
    ELSIF a.state = 3 THEN
      v.verdict := 'done'; v.value := a.result;
      RETURN v;
    ELSIF a.state = 2 THEN
      v.verdict := 'uncertain'; v.value := a.reason; v.at := a.uncertain_at;
      RETURN v;
    ELSIF a.state = 1 AND t < a.expires_at THEN
      v.verdict := 'in_flight'; v.seconds := extract(epoch FROM a.expires_at - t);
      RETURN v;
    ELSIF a.state = 1 THEN
      SELECT * INTO a FROM effect_action WHERE key = p_key FOR UPDATE;
      t := coalesce(p_now, clock_timestamp());
      IF a.state = 1 AND t >= a.expires_at THEN
        PERFORM effect_flip(p_key, t);
      END IF;
      CONTINUE;
    END IF;
    EXIT WHEN v_locked;
    v.seconds := 1;
    IF NOT pg_try_advisory_xact_lock(hashtextextended(p_key, 'effect_action'::regclass::bigint)) THEN
      v.verdict := 'in_flight';
      RETURN v;
    ELSIF NOT pg_try_advisory_xact_lock(hashtextextended(p_resource, 'effect_resource'::regclass::bigint)) THEN
      v.verdict := 'contended';
      RETURN v;
    END IF;
    v_locked := true;
  END LOOP;

  SELECT * INTO r FROM effect_resource WHERE resource = p_resource;
  IF r.action_key <> p_key THEN
    SELECT * INTO h FROM effect_action WHERE key = r.action_key;
    IF effect_is_held(h, r) AND t < h.expires_at THEN
      v.verdict := 'contended'; v.seconds := extract(epoch FROM h.expires_at - t);
      RETURN v;
    END IF;
  END IF;
  IF r.fence IS NULL THEN
    SELECT fence_floor INTO r.fence FROM effect_store;  -- raise_fences waits for those who have read it
  END IF;
  v.verdict := 'granted'; v.at := t; v.attempt := coalesce(a.attempt, 0) + 1; v.fence := r.fence + 1;
  RETURN v;
END $$;


-- Raises like effect_complete_here when anything was granted meanwhile.
CREATE OR REPLACE FUNCTION effect_complete_acquired_here(
  p_key text, p_resource text, p_fingerprint text, p_fence bigint, p_holder uuid,
  p_retry_safe boolean, p_payload text, p_result text, p_now timestamptz DEFAULT NULL
) RETURNS effect_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  a effect_action;
  r effect_resource;
  h effect_action;
  t timestamptz;
  v effect_answer;
BEGIN
  v.verdict := 'completed';
  SELECT * INTO r FROM effect_resource WHERE resource = p_resource FOR UPDATE;
  IF FOUND THEN
    PERFORM FROM effect_action WHERE key IN (p_key, r.action_key) ORDER BY key FOR UPDATE;
    SELECT * INTO h FROM effect_action WHERE key = r.action_key AND key <> p_key;
  END IF;
  IF r.fence IS NULL THEN
    SELECT fence_floor INTO r.fence FROM effect_store;
  END IF;
  SELECT * INTO a FROM effect_action WHERE key = p_key FOR UPDATE;
  t := coalesce(p_now, clock_timestamp());
  IF a.fingerprint <> p_fingerprint THEN
    v.verdict := 'fingerprint_mismatch';
  ELSIF a.state <> 0 OR effect_is_held(h, r) AND t < h.expires_at THEN
    v.verdict := 'lease_lost';
  ELSIF p_fence <> r.fence + 1 THEN
    v.verdict := 'fence_stale';
  ELSE
    IF effect_is_held(h, r) AND h.state = 1 THEN
      PERFORM effect_flip(h.key, t);
    END IF;
    IF r.resource IS NULL THEN
      INSERT INTO effect_resource (resource, fence, granted_fence, action_key)
        VALUES (p_resource, p_fence, p_fence, p_key) ON CONFLICT DO NOTHING;
    ELSE
      UPDATE effect_resource SET fence = p_fence, granted_fence = p_fence, action_key = p_key
        WHERE resource = p_resource AND fence = p_fence - 1;
    END IF;
    IF NOT FOUND THEN
      v.verdict := 'fence_stale';
    ELSE
      IF a.key IS NULL THEN
        INSERT INTO effect_action (
            key, resource, fingerprint, retry_safe, payload, state, attempt, fence, holder, created_at, granted_at, expires_at,
            completed_at, result)
          VALUES (p_key, p_resource, p_fingerprint, p_retry_safe, p_payload, 3, 1, p_fence, p_holder, t, t, t, t, p_result)
          ON CONFLICT DO NOTHING;
      ELSE
        UPDATE effect_action SET
            resource = p_resource, fingerprint = p_fingerprint, retry_safe = p_retry_safe, payload = p_payload,
            state = 3, attempt = attempt + 1, fence = p_fence, holder = p_holder, granted_at = t, expires_at = t,
            completed_at = t, result = p_result, released = false, expired = false, ruling = NULL, due_at = NULL
          WHERE key = p_key AND state = 0;
      END IF;
      IF NOT FOUND THEN
        v.verdict := 'lease_lost';
      END IF;
    END IF;
  END IF;
  IF v.verdict <> 'completed' THEN
    RAISE EXCEPTION USING MESSAGE = 'completion refused: ' || p_key, DETAIL = v.verdict, ERRCODE = 'PGR01';
  END IF;
  v.value := p_result;
  RETURN v;
END $$;


CREATE OR REPLACE FUNCTION effect_renew(
  p_key text, p_resource text, p_fingerprint text, p_lease_resource text, p_fence bigint, p_holder uuid,
  p_ttl interval, p_now timestamptz DEFAULT NULL
) RETURNS effect_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  a effect_action;
  r effect_resource;
  t timestamptz;
  v effect_answer;
BEGIN
  SELECT * INTO r FROM effect_resource WHERE resource = p_resource FOR UPDATE;
  SELECT * INTO a FROM effect_action WHERE key = p_key FOR UPDATE;
  t := coalesce(p_now, clock_timestamp());
  v.verdict := effect_lease_fault(a, r, p_fingerprint, p_lease_resource, p_resource, p_fence, p_holder);
  v.fence := r.granted_fence;
  IF v.verdict IS NULL AND a.state = 1 AND t < a.expires_at THEN
    UPDATE effect_action SET expires_at = t + p_ttl WHERE key = p_key AND fence = p_fence AND holder = p_holder AND state = 1;
    v.verdict := 'renewed'; v.at := t + p_ttl;
  END IF;
  v.verdict := coalesce(v.verdict, 'lease_lost');
  RETURN v;
END $$;


-- Waits for no row lock: what another transaction holds is answered 'busy'. A renewable intent is the newest grant
-- of its resource unless it was released; released ones are compared with their resource.
CREATE OR REPLACE FUNCTION effect_renew_many(
  p_keys text[], p_resources text[], p_fingerprints text[], p_lease_resources text[], p_fences bigint[], p_holders uuid[],
  p_ttl interval, p_now timestamptz DEFAULT NULL
) RETURNS TABLE (ordinal bigint, verdict text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
#variable_conflict use_column
DECLARE
  t timestamptz;
  v_locked text[];
  v_renewed text[];
BEGIN
  SELECT array_agg(l.key) INTO v_locked FROM (
    SELECT key FROM effect_action WHERE key = ANY (p_keys) ORDER BY key FOR UPDATE SKIP LOCKED
  ) l;
  t := coalesce(p_now, clock_timestamp());
  WITH asked AS (
    SELECT * FROM unnest(p_keys, p_resources, p_fingerprints, p_lease_resources, p_fences, p_holders)
      AS u (key, resource, fingerprint, lease_resource, fence, holder)
  ), renewed AS (
    UPDATE effect_action a SET expires_at = t + p_ttl FROM asked u
      WHERE a.key = u.key AND a.key = ANY (v_locked) AND a.fence = u.fence AND a.holder = u.holder AND a.resource = u.resource
        AND u.resource = u.lease_resource AND (a.fingerprint = u.fingerprint) IS NOT FALSE
        AND a.state = 1 AND t < a.expires_at
        AND (NOT a.released OR EXISTS (
          SELECT FROM effect_resource r WHERE r.resource = a.resource AND r.granted_fence = a.fence))
      RETURNING a.key
  )
  SELECT array_agg(key) INTO v_renewed FROM renewed;
  RETURN QUERY
    SELECT u.ordinal, CASE
        WHEN a.key IS NULL THEN 'lost'
        WHEN NOT a.key = ANY (coalesce(v_locked, '{}')) THEN 'busy'
        WHEN a.key = ANY (v_renewed) AND a.fence = u.fence AND a.holder = u.holder AND a.resource = u.resource
          AND u.resource = u.lease_resource AND (a.fingerprint = u.fingerprint) IS NOT FALSE THEN 'renewed'
        ELSE 'lost' END
      FROM unnest(p_keys, p_resources, p_fingerprints, p_lease_resources, p_fences, p_holders)
        WITH ORDINALITY AS u (key, resource, fingerprint, lease_resource, fence, holder, ordinal)
      LEFT JOIN effect_action a ON a.key = u.key
      ORDER BY u.ordinal;
END $$;


-- As effect_renew_many, for somebody who has seen the attempts run and holds no lease.
CREATE OR REPLACE FUNCTION effect_renew_running(
  p_keys text[], p_fences bigint[], p_ttl interval, p_now timestamptz DEFAULT NULL
) RETURNS TABLE (ordinal bigint, verdict text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
#variable_conflict use_column
DECLARE
  t timestamptz;
  v_locked text[];
BEGIN
  SELECT array_agg(l.key) INTO v_locked FROM (
    SELECT key FROM effect_action WHERE key = ANY (p_keys) ORDER BY key FOR UPDATE SKIP LOCKED
  ) l;
  t := coalesce(p_now, clock_timestamp());
  RETURN QUERY
    WITH asked AS (
      SELECT * FROM unnest(p_keys, p_fences) WITH ORDINALITY u (key, fence, ordinal)
    ), renewed AS (
      UPDATE effect_action a SET expires_at = t + p_ttl FROM asked u
        WHERE a.key = u.key AND a.key = ANY (v_locked) AND a.fence = u.fence AND a.state = 1 AND t < a.expires_at
          AND (NOT a.released OR EXISTS (
            SELECT FROM effect_resource r WHERE r.resource = a.resource AND r.granted_fence = a.fence))
        RETURNING a.key
    )
    SELECT u.ordinal, CASE WHEN w.key IS NOT NULL THEN 'renewed'
        WHEN a.key IS NOT NULL AND NOT a.key = ANY (coalesce(v_locked, '{}')) THEN 'busy' ELSE 'lost' END
      FROM asked u LEFT JOIN renewed w ON w.key = u.key LEFT JOIN effect_action a ON a.key = u.key ORDER BY u.ordinal;
END $$;


-- State, reason and history in one transaction; the resource stays held until release or expiry (G14, G21).
CREATE OR REPLACE FUNCTION effect_mark_uncertain(
  p_key text, p_resource text, p_fingerprint text, p_lease_resource text, p_fence bigint, p_holder uuid,
  p_reason text, p_by text, p_now timestamptz DEFAULT NULL
) RETURNS effect_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  a effect_action;
  t timestamptz;
  v effect_answer;
BEGIN
  SELECT * INTO a FROM effect_action WHERE key = p_key FOR UPDATE;
  t := coalesce(p_now, clock_timestamp());
  v.verdict := effect_intent_fault(a, p_fingerprint, p_lease_resource, p_resource, p_fence, p_holder);
  v.fence := a.fence;
  IF v.verdict IS NULL AND a.state = 1 THEN
    UPDATE effect_action SET state = 2, reason = p_reason, uncertain_at = t
      WHERE key = p_key AND fence = p_fence AND holder = p_holder AND state = 1;
    INSERT INTO effect_history (key, at, event, fence, "by", why) VALUES (p_key, t, 'marked', p_fence, p_by, p_reason);
    v.verdict := 'ok';
  ELSIF v.verdict IS NULL AND a.state = 2 THEN
    v.verdict := 'ok';
  END IF;
  v.verdict := coalesce(v.verdict, 'lease_lost');
  RETURN v;
END $$;


-- Free the resource, keep the intent: the key stays unacquirable (G15).
CREATE OR REPLACE FUNCTION effect_release(
  p_key text, p_resource text, p_fingerprint text, p_lease_resource text, p_fence bigint, p_holder uuid
) RETURNS effect_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  a effect_action;
  r effect_resource;
  v effect_answer;
BEGIN
  SELECT * INTO r FROM effect_resource WHERE resource = p_resource FOR UPDATE;
  SELECT * INTO a FROM effect_action WHERE key = p_key FOR UPDATE;
  v.verdict := effect_lease_fault(a, r, p_fingerprint, p_lease_resource, p_resource, p_fence, p_holder);
  v.fence := r.granted_fence;
  IF v.verdict IS NULL THEN
    UPDATE effect_action SET released = true
      WHERE key = p_key AND fence = p_fence AND holder = p_holder AND state IN (1, 2) AND NOT released;
    v.verdict := 'ok';
  END IF;
  RETURN v;
END $$;


-- Withdraw the intent: it did not happen. An expired intent is no longer the holder's to withdraw (G3, G15).
CREATE OR REPLACE FUNCTION effect_abandon(
  p_key text, p_resource text, p_fingerprint text, p_lease_resource text, p_fence bigint, p_holder uuid,
  p_due_in interval, p_now timestamptz DEFAULT NULL
) RETURNS effect_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  a effect_action;
  t timestamptz;
  v effect_answer;
BEGIN
  SELECT * INTO a FROM effect_action WHERE key = p_key FOR UPDATE;
  t := coalesce(p_now, clock_timestamp());
  v.verdict := effect_intent_fault(a, p_fingerprint, p_lease_resource, p_resource, p_fence, p_holder);
  v.fence := a.fence;
  IF v.verdict IS NULL AND a.state = 1 AND t < a.expires_at THEN
    UPDATE effect_action SET state = 0, due_at = CASE WHEN payload IS NOT NULL THEN t + p_due_in END
      WHERE key = p_key AND fence = p_fence AND holder = p_holder AND state = 1;
    v.verdict := 'ok';
  ELSIF v.verdict IS NULL AND a.state = 0 THEN
    v.verdict := 'ok';
  END IF;
  v.verdict := coalesce(v.verdict, 'lease_lost');
  RETURN v;
END $$;


-- One reconciler at a time, with a fence to seal the sink with before looking (G18, G27).
CREATE OR REPLACE FUNCTION effect_begin_reconcile(
  p_key text, p_fingerprint text, p_holder uuid, p_ttl interval, p_early boolean, p_now timestamptz DEFAULT NULL
) RETURNS effect_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  a effect_action;
  r effect_resource;
  h effect_action;
  t timestamptz;
  v_floor bigint;
  v effect_answer;
BEGIN
  SELECT fence_floor INTO v_floor FROM effect_store;  -- first, as raise_fences does
  SELECT * INTO a FROM effect_action WHERE key = p_key;
  SELECT * INTO r FROM effect_resource WHERE resource = a.resource FOR UPDATE;
  SELECT * INTO a FROM effect_action WHERE key = p_key AND resource = r.resource FOR UPDATE;
  t := coalesce(p_now, clock_timestamp());
  IF a.fingerprint <> p_fingerprint THEN
    v.verdict := 'fingerprint_mismatch';
    RETURN v;
  END IF;
  IF a.state = 1 AND t >= a.expires_at THEN
    PERFORM effect_flip(p_key, t);
    a.state := 2;
  END IF;
  IF a.state IS DISTINCT FROM 2 THEN
    v.verdict := 'not_uncertain'; v.attempt := a.state;
    RETURN v;
  END IF;
  v.seconds := extract(epoch FROM a.reconcile_expires_at - t);
  IF a.reconcile_fence IS NOT NULL AND t < a.reconcile_expires_at THEN
    v.verdict := CASE WHEN a.reconciler = p_holder THEN 'claimed' ELSE 'reconcile_taken' END;
    v.fence := a.reconcile_fence; v.at := a.reconcile_expires_at; v.value := a.resource;
    RETURN v;
  ELSIF NOT p_early AND (a.parked OR a.reconcile_fence IS NULL AND t < a.reconcile_expires_at) THEN
    v.verdict := 'reconcile_deferred';
    RETURN v;
  END IF;
  SELECT * INTO h FROM effect_action WHERE key = r.action_key AND key <> p_key;
  IF coalesce(effect_is_held(h, r) AND t < h.expires_at, false)
    AND r.granted_fence > v_floor THEN
    v.fence := r.granted_fence;
  ELSE
    v.fence := r.fence + 1;
    UPDATE effect_resource SET fence = v.fence WHERE resource = r.resource AND fence = r.fence;
  END IF;
  UPDATE effect_action SET
      reconciler = p_holder, reconcile_fence = v.fence, reconcile_expires_at = t + p_ttl, looks = looks + 1, parked = false
    WHERE key = p_key AND state = 2;
  v.verdict := 'claimed'; v.at := t + p_ttl; v.value := a.resource;
  RETURN v;
END $$;


-- Many at once, for a sweep: those that have waited longest for a look. The actions are locked before their resources,
-- which is safe since neither lock is waited for: a key whose resource is locked by another is left for the next sweep.
CREATE OR REPLACE FUNCTION effect_claim_backlog(p_limit integer, p_holder uuid, p_ttl interval, p_now timestamptz DEFAULT NULL)
RETURNS SETOF effect_action
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  t timestamptz := coalesce(p_now, clock_timestamp());
  v_floor bigint;
  v_keys text[];
  v_resources text[];
BEGIN
  SELECT fence_floor INTO v_floor FROM effect_store;  -- first, as raise_fences does
  SELECT array_agg(f.key), array_agg(DISTINCT f.resource) INTO v_keys, v_resources FROM (
    SELECT key, resource FROM effect_action
      WHERE uncertain_at IS NOT NULL AND NOT parked AND coalesce(reconcile_expires_at, uncertain_at) <= t
      ORDER BY coalesce(reconcile_expires_at, uncertain_at), key LIMIT p_limit FOR UPDATE SKIP LOCKED
  ) f;
  SELECT array_agg(f.resource) INTO v_resources FROM (
    SELECT resource FROM effect_resource WHERE resource = ANY (v_resources) FOR UPDATE SKIP LOCKED
  ) f;
  t := coalesce(p_now, clock_timestamp());
  RETURN QUERY
    WITH found AS (
      SELECT a.key, r.resource, r.fence, r.granted_fence, coalesce(a.reconcile_expires_at, a.uncertain_at) AS since,
          coalesce(effect_is_held(h, r) AND t < h.expires_at, false) AND r.granted_fence > v_floor AS spared
        FROM effect_action a
        JOIN effect_resource r ON r.resource = a.resource
        LEFT JOIN effect_action h ON h.key = r.action_key AND h.key <> a.key
        WHERE a.key = ANY (v_keys) AND a.resource = ANY (v_resources)
    ), minted AS (
      SELECT key, resource, CASE WHEN spared THEN granted_fence
          ELSE fence + row_number() OVER (PARTITION BY resource, spared ORDER BY since, key) END AS seal
        FROM found
    ), raised AS (
      UPDATE effect_resource r SET fence = m.fence
        FROM (SELECT resource, max(seal) AS fence FROM minted GROUP BY resource) m
        WHERE r.resource = m.resource AND r.fence < m.fence
    )
    UPDATE effect_action a SET
        reconciler = p_holder, reconcile_fence = m.seal, reconcile_expires_at = t + p_ttl, looks = looks + 1
      FROM minted m WHERE a.key = m.key AND a.state = 2
      RETURNING a.*;
END $$;


-- Give a claim back without a ruling: for a while, or, without p_for, until a person comes (G18, G21).
CREATE OR REPLACE FUNCTION effect_defer_reconcile(
  p_key text, p_claim uuid, p_for interval, p_note text, p_by text, p_now timestamptz DEFAULT NULL
) RETURNS effect_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  a effect_action;
  t timestamptz;
  v effect_answer;
BEGIN
  SELECT * INTO a FROM effect_action WHERE key = p_key FOR UPDATE;
  t := coalesce(p_now, clock_timestamp());
  IF a.state IS DISTINCT FROM 2 THEN
    v.verdict := 'not_uncertain'; v.attempt := a.state;
  ELSIF a.reconciler IS DISTINCT FROM p_claim THEN
    v.verdict := 'reconcile_taken';
  ELSE
    v.verdict := 'ok';
    UPDATE effect_action SET reconcile_fence = NULL, reconcile_expires_at = t + p_for, parked = p_for IS NULL, note = p_note
      WHERE key = p_key AND state = 2 AND reconciler = p_claim AND reconcile_fence IS NOT NULL;
    IF FOUND AND p_for IS NULL THEN
      INSERT INTO effect_history (key, at, event, fence, "by", why) VALUES (p_key, t, 'parked', a.fence, p_by, p_note);
    END IF;
  END IF;
  RETURN v;
END $$;


-- The first ruling wins. Asks for no fence and no claim: its ground is what happened downstream (G19-G21).
CREATE OR REPLACE FUNCTION effect_resolve_uncertain(
  p_key text, p_fingerprint text, p_applied boolean, p_result text, p_by text, p_why text, p_force boolean,
  p_now timestamptz DEFAULT NULL, p_claim uuid DEFAULT NULL
) RETURNS effect_answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  a effect_action;
  t timestamptz;
  v effect_answer;
BEGIN
  SELECT * INTO a FROM effect_action WHERE key = p_key FOR UPDATE;
  t := coalesce(p_now, clock_timestamp());
  IF a.fingerprint <> p_fingerprint THEN
    v.verdict := 'fingerprint_mismatch';
    RETURN v;
  END IF;
  IF a.state = 1 AND t >= a.expires_at THEN
    PERFORM effect_flip(p_key, t);
    a.state := 2;
  END IF;
  IF a.state = 3 THEN
    v.verdict := 'applied'; v.value := a.result;
  ELSIF a.state = 0 AND a.ruling = false THEN
    v.verdict := 'not_applied';
  ELSIF a.state IS DISTINCT FROM 2 THEN
    v.verdict := 'not_uncertain'; v.attempt := a.state;
  ELSIF p_claim IS NOT NULL AND a.reconciler IS DISTINCT FROM p_claim THEN
    -- What was looked at has been ruled on since: this is another attempt's uncertainty.
    v.verdict := 'reconcile_taken';
  ELSIF p_applied THEN
    UPDATE effect_action SET
      state = 3, ruling = true, result = p_result, completed_at = t, uncertain_at = NULL, expired = false, reason = NULL,
      reconciler = NULL, reconcile_fence = NULL, reconcile_expires_at = NULL, looks = 0, parked = false, note = NULL
      WHERE key = p_key AND state = 2;
    INSERT INTO effect_history (key, at, event, fence, "by", why) VALUES (p_key, t, 'ruled_applied', a.fence, p_by, p_why);
    v.verdict := 'applied'; v.value := p_result;
  ELSIF NOT a.retry_safe AND NOT p_force THEN
    v.verdict := 'unsafe_not_retryable';
  ELSE
    UPDATE effect_action SET
      state = 0, ruling = false, uncertain_at = NULL, expired = false, reason = NULL, due_at = CASE WHEN payload IS NOT NULL THEN t END,
      reconciler = NULL, reconcile_fence = NULL, reconcile_expires_at = NULL, looks = 0, parked = false, note = NULL
      WHERE key = p_key AND state = 2;
    INSERT INTO effect_history (key, at, event, fence, "by", why)
      VALUES (p_key, t, 'ruled_not_applied', a.fence, p_by, p_why);
    IF NOT a.retry_safe THEN
      INSERT INTO effect_history (key, at, event, fence, "by", why) VALUES (p_key, t, 'forced', a.fence, p_by, p_why);
    END IF;
    v.verdict := 'not_applied';
  END IF;
  RETURN v;
END $$;


-- Expired intents are found by the time of their grant, since an index on state or expiry would make every completion
-- touch the indexes. Nothing granted before the watermark is in flight; it stays ten minutes behind the clock, for
-- grants whose commit is slow.
CREATE OR REPLACE FUNCTION effect_expire_intents(p_limit integer, p_now timestamptz DEFAULT NULL) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  t timestamptz := coalesce(p_now, clock_timestamp());
  v_watermark timestamptz;
  v_oldest timestamptz;
  v_count integer;
BEGIN
  SELECT granted_before INTO v_watermark FROM effect_store;
  WITH found AS (
    SELECT key FROM effect_action
      WHERE granted_at >= v_watermark AND state = 1 AND expires_at <= t
      ORDER BY granted_at, key LIMIT p_limit FOR UPDATE SKIP LOCKED
  ), flipped AS (
    UPDATE effect_action a SET state = 2, expired = true, reason = 'lease expired', uncertain_at = t
      FROM found WHERE a.key = found.key AND a.state = 1
      RETURNING a.key, a.fence
  )
  INSERT INTO effect_history (key, at, event, fence, "by", why)
    SELECT key, t, 'expired', fence, 'store', 'lease expired' FROM flipped;
  GET DIAGNOSTICS v_count = ROW_COUNT;
  SELECT granted_at INTO v_oldest FROM effect_action
    WHERE granted_at >= v_watermark AND state = 1 ORDER BY granted_at LIMIT 1;
  v_oldest := least(v_oldest, t - interval '10 minutes');
  IF v_oldest > v_watermark + interval '1 minute' THEN
    UPDATE effect_store SET granted_before = v_oldest WHERE granted_before < v_oldest;
  END IF;
  RETURN v_count;
END $$;


-- Free keys that are still wanted: each goes to one caller, and comes again if nobody is granted it meanwhile.
CREATE OR REPLACE FUNCTION effect_claim_due(p_limit integer, p_again_after interval, p_now timestamptz DEFAULT NULL)
RETURNS SETOF effect_action
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  t timestamptz := coalesce(p_now, clock_timestamp());
BEGIN
  RETURN QUERY
    WITH found AS (
      SELECT key FROM effect_action WHERE due_at <= t AND state = 0 ORDER BY due_at, key LIMIT p_limit FOR UPDATE SKIP LOCKED
    )
    UPDATE effect_action a SET due_at = t + p_again_after FROM found WHERE a.key = found.key AND a.state = 0 RETURNING a.*;
END $$;


-- After a failover that may have lost commits: no later grant at or below the floor, no intent of before trusted (G28).
-- Who makes a resource has read the floor, which this waits for and shuts out. Other grants go by the row of their
-- resource: they are over, with their intent in sight, before it is locked here, or see its new fence after.
CREATE OR REPLACE FUNCTION effect_raise_fences(p_floor bigint, p_by text, p_why text, p_now timestamptz DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  t timestamptz;
  v_count integer;
BEGIN
  LOCK TABLE effect_store IN ACCESS EXCLUSIVE MODE;
  PERFORM FROM effect_resource ORDER BY resource FOR UPDATE;
  PERFORM FROM effect_action WHERE state = 1 ORDER BY key FOR UPDATE;
  t := coalesce(p_now, clock_timestamp());
  UPDATE effect_store SET fence_floor = p_floor WHERE fence_floor < p_floor;
  UPDATE effect_resource SET fence = p_floor WHERE fence < p_floor;
  WITH turned AS (
    UPDATE effect_action SET state = 2, expired = false, reason = 'fences raised', uncertain_at = t WHERE state = 1
      RETURNING key, fence
  )
  INSERT INTO effect_history (key, at, event, fence, "by", why)
    SELECT key, t, 'fences_raised', fence, p_by, p_why FROM turned;
  GET DIAGNOSTICS v_count = ROW_COUNT;
  RETURN v_count;
END $$;


-- Whole keys, done for longer than asked, the oldest first (G25). The row of the resource keeps its fence.
CREATE OR REPLACE FUNCTION effect_retain(p_older_than interval, p_limit integer, p_now timestamptz DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '4s' AS $$
DECLARE
  v_before timestamptz := coalesce(p_now, clock_timestamp()) - p_older_than;
  v_keys text[];
BEGIN
  WITH found AS (
    SELECT key FROM effect_action
      WHERE granted_at < v_before AND state = 3 AND completed_at < v_before
      ORDER BY granted_at, key LIMIT p_limit FOR UPDATE SKIP LOCKED
  ), removed AS (
    DELETE FROM effect_action WHERE key = ANY (ARRAY(SELECT key FROM found)) AND state = 3 RETURNING key
  )
  SELECT array_agg(key) INTO v_keys FROM removed;
  DELETE FROM effect_history WHERE key = ANY (v_keys);
  DELETE FROM effect_evidence WHERE key = ANY (v_keys);
  RETURN coalesce(cardinality(v_keys), 0);
END $$;


CREATE OR REPLACE FUNCTION effect_lookup(p_key text) RETURNS SETOF effect_action
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
BEGIN ATOMIC
  SELECT * FROM effect_action WHERE key = p_key;
END;


CREATE OR REPLACE FUNCTION effect_backlog(
  p_limit integer, p_prefix text, p_reason text, p_age interval, p_parked boolean, p_after timestamptz, p_after_key text,
  p_now timestamptz DEFAULT NULL
) RETURNS SETOF effect_action
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
BEGIN ATOMIC
  SELECT * FROM effect_action
    WHERE uncertain_at IS NOT NULL
      AND (uncertain_at, key) > (coalesce(p_after, '-infinity'), coalesce(p_after_key, ''))
      AND uncertain_at < CASE WHEN p_age IS NULL THEN 'infinity' ELSE coalesce(p_now, clock_timestamp()) - p_age END
      AND starts_with(key, p_prefix) AND position(p_reason IN reason) > 0 AND (p_parked IS NULL OR parked = p_parked)
    ORDER BY uncertain_at, key LIMIT p_limit;
END;


CREATE OR REPLACE FUNCTION effect_tallies(p_now timestamptz DEFAULT NULL)
RETURNS TABLE (kind text, scope text, reason text, count bigint, oldest_at timestamptz, next_at timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := coalesce(p_now, clock_timestamp());
  v_watermark timestamptz := (SELECT granted_before FROM effect_store);
BEGIN
  RETURN QUERY
    SELECT CASE WHEN parked THEN 'parked' ELSE 'uncertain' END, split_part(key, ':', 1), reason, count(*), min(uncertain_at),
        min(coalesce(reconcile_expires_at, uncertain_at)) FILTER (WHERE NOT parked)
      FROM effect_action WHERE uncertain_at IS NOT NULL GROUP BY 1, 2, 3
    UNION ALL
    SELECT 'due', split_part(key, ':', 1), NULL, count(*), min(due_at), min(due_at)
      FROM effect_action WHERE due_at IS NOT NULL GROUP BY 2
    UNION ALL
    SELECT CASE WHEN t < expires_at THEN 'in_flight' ELSE 'expired' END, split_part(key, ':', 1), NULL, count(*),
        min(granted_at), min(expires_at) FILTER (WHERE t >= expires_at)
      FROM effect_action WHERE granted_at >= v_watermark AND state = 1 GROUP BY 1, 2;
END $$;


CREATE OR REPLACE FUNCTION effect_now(p_now timestamptz DEFAULT NULL) RETURNS timestamptz
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT
BEGIN ATOMIC
  SELECT coalesce(p_now, clock_timestamp());
END;


CREATE OR REPLACE FUNCTION effect_history(p_key text) RETURNS SETOF effect_history
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
BEGIN ATOMIC
  SELECT * FROM effect_history WHERE key = p_key ORDER BY id;
END;


CREATE OR REPLACE FUNCTION effect_evidence(p_key text) RETURNS SETOF effect_evidence
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
BEGIN ATOMIC
  SELECT * FROM effect_evidence WHERE key = p_key ORDER BY at, fence;
END;
