-- Fenced sinks: compare and raise in one statement; the caller writes in the same transaction (G30-G34).

CREATE OR REPLACE FUNCTION sink_admit(p_resource text, p_fence bigint) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  v_seen bigint;
BEGIN
  INSERT INTO sink_fence AS s (resource, fence) VALUES (p_resource, p_fence)
    ON CONFLICT (resource) DO UPDATE SET fence = excluded.fence WHERE s.fence <= excluded.fence
    RETURNING s.fence INTO v_seen;
  IF v_seen IS NULL THEN
    SELECT fence INTO v_seen FROM sink_fence WHERE resource = p_resource;
  END IF;
  RETURN v_seen;
END $$;


CREATE OR REPLACE FUNCTION sink_seen(p_resource text) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT
BEGIN ATOMIC
  SELECT coalesce((SELECT fence FROM sink_fence WHERE resource = p_resource), 0);
END;
