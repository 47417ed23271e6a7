"""The app's tests, for ``python -m django test``: how a project tests fenced tasks in Django's own test database."""

from django.db import connection, transaction
from django.test import TransactionTestCase
from sqlalchemy import make_url

from celery_integration import ConfigurationError
from celery_integration.process import gate_of
from examples.django import app
from examples.django.ledger.models import Entry
from examples.django.ledger.tasks import book


class FencedTestCase(TransactionTestCase):  # type: ignore[misc]  # Django is not typed
    """Not a ``TestCase``, which never commits. The gate moves to the test database.

    Its keys stay when the tables are emptied after a test: let each test use keys of its own.
    """

    @classmethod
    def setUpClass(cls) -> None:
        """Make the gate in the test database, whose name is only known now."""
        super().setUpClass()
        dsn = make_url(app.conf.fenced_dsn).set(database=connection.settings_dict["NAME"])
        app.conf.fenced_dsn = dsn.render_as_string(hide_password=False)
        gate_of(app).stores.ensure_schema()

    @classmethod
    def tearDownClass(cls) -> None:
        """Close the gate's connections, or the test database could not be dropped."""
        gate_of(app).stores.close()
        super().tearDownClass()


class BookTest(FencedTestCase):
    """What callers of `book` rely on."""

    def test_two_deliveries_book_once(self) -> None:
        """The second one returns the result of the first."""
        assert book("1", 1200) == book("1", 1200) == {"booked": 1200, "attempt": 1}
        assert [entry.cents for entry in Entry.objects.all()] == [1200]

    def test_it_is_not_called_inside_a_transaction(self) -> None:
        """It could not commit there."""
        with transaction.atomic(), self.assertRaises(ConfigurationError):  # noqa: PT027  no pytest here
            book("2", 1200)
        assert not Entry.objects.exists()
