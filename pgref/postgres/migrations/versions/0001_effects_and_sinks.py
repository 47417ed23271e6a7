"""Effects and sinks."""

from alembic import op

revision = "pgref_0001"
down_revision = None
branch_labels = ("pgref",)
depends_on = None

# Fixed-width columns first. No index names a column that completing or renewing changes: those updates stay HOT.
TABLES = """
CREATE TABLE effect_resource (
  fence bigint NOT NULL,
  granted_fence bigint NOT NULL,
  resource text COLLATE "C" PRIMARY KEY,
  action_key text COLLATE "C" NOT NULL
) WITH (fillfactor = 70);
COMMENT ON COLUMN effect_resource.fence IS 'highest ever minted, by grants and by reconcile claims';
COMMENT ON COLUMN effect_resource.granted_fence IS 'fence of the newest grant, which went to action_key';

CREATE TABLE effect_action (
  fence bigint NOT NULL,
  created_at timestamptz NOT NULL,
  granted_at timestamptz NOT NULL,
  expires_at timestamptz NOT NULL,
  completed_at timestamptz,
  uncertain_at timestamptz,
  due_at timestamptz,
  reconcile_expires_at timestamptz,
  reconcile_fence bigint,
  holder uuid NOT NULL,
  reconciler uuid,
  attempt integer NOT NULL,
  state smallint NOT NULL,
  retry_safe boolean NOT NULL,
  released boolean NOT NULL DEFAULT false,
  expired boolean NOT NULL DEFAULT false,
  ruling boolean,
  key text COLLATE "C" PRIMARY KEY,
  resource text COLLATE "C" NOT NULL,
  fingerprint text COLLATE "C",
  reason text,
  payload text,
  result text
) WITH (fillfactor = 85);
COMMENT ON COLUMN effect_action.state IS
  '0 free: not yet, or no longer, running; left by a grant.
1 in flight: an attempt runs; left by complete, abandon, mark_uncertain and expiry.
2 uncertain: it may have happened; left by a ruling, or by the same attempt''s late completion after an expiry.
3 done: it happened, the result is kept; left by retention only.';
COMMENT ON COLUMN effect_action.expired IS 'the uncertain state was entered by expiry, not by a mark';
COMMENT ON COLUMN effect_action.ruling IS 'true: applied, false: not applied; cleared by a grant';
COMMENT ON COLUMN effect_action.due_at IS 'a free key that is still wanted is dispatched again from this time on';
CREATE INDEX effect_action_granted ON effect_action (granted_at);
CREATE INDEX effect_action_backlog ON effect_action (uncertain_at, key) WHERE uncertain_at IS NOT NULL;
CREATE INDEX effect_action_due ON effect_action (due_at) WHERE due_at IS NOT NULL;

CREATE TABLE effect_history (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at timestamptz NOT NULL,
  fence bigint NOT NULL,
  key text COLLATE "C" NOT NULL,
  event text NOT NULL,
  "by" text NOT NULL,
  why text NOT NULL
);
CREATE INDEX effect_history_key ON effect_history (key);

CREATE TABLE effect_evidence (
  at timestamptz NOT NULL,
  fence bigint NOT NULL,
  holder uuid NOT NULL,
  key text COLLATE "C" NOT NULL,
  result text,
  PRIMARY KEY (key, fence, holder)
);

CREATE TABLE effect_store (
  granted_before timestamptz NOT NULL,
  fence_floor bigint NOT NULL,
  one boolean PRIMARY KEY DEFAULT true CHECK (one)
);
INSERT INTO effect_store (granted_before, fence_floor) VALUES ('-infinity', 0);
COMMENT ON COLUMN effect_store.granted_before IS 'no action granted before this time is in flight';
COMMENT ON COLUMN effect_store.fence_floor IS 'every fence is above this one';

CREATE TABLE sink_fence (
  fence bigint NOT NULL,
  resource text COLLATE "C" PRIMARY KEY
) WITH (fillfactor = 70);

CREATE FUNCTION refuse_lower_fence() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION USING MESSAGE = 'a fence never goes down', ERRCODE = 'integrity_constraint_violation';
END $$;
CREATE TRIGGER fence_rises BEFORE UPDATE ON effect_resource FOR EACH ROW
  WHEN (new.fence < old.fence OR new.granted_fence < old.granted_fence) EXECUTE FUNCTION refuse_lower_fence();
CREATE TRIGGER fence_rises BEFORE UPDATE ON sink_fence FOR EACH ROW
  WHEN (new.fence < old.fence) EXECUTE FUNCTION refuse_lower_fence();

-- For monitoring: no payload, no result, no fingerprint.
CREATE VIEW effect_overview AS
  SELECT key, resource, (ARRAY['free', 'in_flight', 'uncertain', 'done'])[state + 1] AS state, attempt, fence, released,
    created_at, granted_at, expires_at, uncertain_at, completed_at, due_at, reason
  FROM effect_action;
COMMENT ON VIEW effect_overview IS 'what monitoring may see of every key';

CREATE TYPE effect_answer AS (
  verdict text,
  fence bigint,
  at timestamptz,
  attempt integer,
  value text,
  seconds double precision
);
"""


def upgrade() -> None:
    op.execute(TABLES)


def downgrade() -> None:
    raise NotImplementedError("migrations are append-only")
