"""Uncertain keys can be put off, parked, and listed by what they wait for."""

from alembic import op

revision = "pgref_0002"
down_revision = "pgref_0001"
branch_labels = None
depends_on = None

PUTTING_OFF = """
ALTER TABLE effect_action
  ADD looks integer NOT NULL DEFAULT 0,
  ADD parked boolean NOT NULL DEFAULT false,
  ADD note text;
COMMENT ON COLUMN effect_action.reconciler IS 'whoever claimed it last; given back if reconcile_fence is null';
COMMENT ON COLUMN effect_action.reconcile_expires_at IS 'when the claim ends, or until when it is put off';
COMMENT ON COLUMN effect_action.looks IS 'how often it was claimed since it became uncertain';
COMMENT ON COLUMN effect_action.parked IS 'waits for a person: no sweep is given it';
COMMENT ON COLUMN effect_action.note IS 'what the last reconciler that put it off had to say';
CREATE INDEX effect_action_looks ON effect_action ((coalesce(reconcile_expires_at, uncertain_at)), key)
  WHERE uncertain_at IS NOT NULL AND NOT parked;

DROP FUNCTION IF EXISTS effect_unclaimed_backlog(integer, timestamptz);
DROP FUNCTION IF EXISTS effect_backlog(integer);
DROP FUNCTION IF EXISTS effect_begin_reconcile(text, text, uuid, interval, timestamptz);

CREATE OR REPLACE VIEW effect_overview AS
  SELECT key, resource, (ARRAY['free', 'in_flight', 'uncertain', 'done'])[state + 1] AS state, attempt, fence, released,
    created_at, granted_at, expires_at, uncertain_at, completed_at, due_at, reason, looks, parked
  FROM effect_action;
"""


def upgrade() -> None:
    op.execute(PUTTING_OFF)


def downgrade() -> None:
    raise NotImplementedError("migrations are append-only")
