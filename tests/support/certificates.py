"""Folders as ``--tls`` names them: an authority, and certificates that it has signed."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fleet.host.tls import AUTHORITY, CERTIFICATE, KEY

DAY = datetime.timedelta(days=1)
PEM = serialization.Encoding.PEM


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Authority:
    """Signs certificates. Two of the same ``name`` are different ones."""

    def __init__(self, name: str = "fleet test authority") -> None:
        self._key, self._name = ec.generate_private_key(ec.SECP256R1()), _name(name)
        made = self._begun(self._name, self._key, -DAY, DAY).add_extension(x509.BasicConstraints(True, None), critical=True)
        self.certificate = made.sign(self._key, hashes.SHA256())

    def _begun(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, begin: datetime.timedelta, end: datetime.timedelta
    ) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
        return made.not_valid_before(_now() + begin).not_valid_after(_now() + end)

    def folder(self, folder: Path, *, begin: datetime.timedelta = -DAY, end: datetime.timedelta = DAY, for_clients: bool = True) -> str:
        """Write the three files into ``folder``; returns its path. ``for_clients``: the certificate may be shown by clients, too."""
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if for_clients else [])]
        made = self._begun(_name("a host"), key, begin, end).add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        (folder / AUTHORITY).write_bytes(self.certificate.public_bytes(PEM))
        (folder / CERTIFICATE).write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(PEM))
        (folder / KEY).write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
        (folder / KEY).chmod(0o600)
        return str(folder)
