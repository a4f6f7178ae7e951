//! TLS: certificate and key from PEM texts, replaced while serving without touching a connection.

use arc_swap::ArcSwap;
use std::fmt;
use std::sync::Arc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::CryptoProvider;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{Error, InconsistentKeys, ServerConfig};

/// What a listener needs to speak TLS 1.2 and 1.3. Clones share the certificate.
#[derive(Clone)]
pub struct Tls {
    acceptor: TlsAcceptor,
    current: Arc<Current>,
    provider: Arc<CryptoProvider>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

/// The certificate that new connections get.
#[derive(Debug)]
struct Current(ArcSwap<CertifiedKey>);

impl ResolvesServerCert for Current {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.load_full())
    }
}

impl Tls {
    /// TLS with this certificate chain, the server's own first, and its private key.
    ///
    /// # Errors
    /// What is wrong with which of them.
    pub fn new(certificate: &[u8], key: &[u8]) -> Result<Self, String> {
        let provider = Arc::new(default_provider());
        let current = Arc::new(Current(ArcSwap::from_pointee(certified(certificate, key, &provider)?)));
        let versions = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
        let mut config = versions.map_err(|error| error.to_string())?.with_no_client_auth().with_cert_resolver(Arc::<
            Current,
        >::clone(
            &current,
        ));
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self { acceptor: TlsAcceptor::from(Arc::new(config)), current, provider })
    }

    /// Gives the next connections another certificate; those that are open keep theirs.
    ///
    /// # Errors
    /// What is wrong with which of them; the old one stays then.
    pub fn replace(&self, certificate: &[u8], key: &[u8]) -> Result<(), String> {
        self.current.0.store(Arc::new(certified(certificate, key, &self.provider)?));
        Ok(())
    }

    /// What turns an accepted connection into an encrypted one.
    pub(super) fn acceptor(&self) -> &TlsAcceptor {
        &self.acceptor
    }
}

fn certified(certificate: &[u8], key: &[u8], provider: &CryptoProvider) -> Result<CertifiedKey, String> {
    let chain = CertificateDer::pem_slice_iter(certificate).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(|error| format!("the certificate is not PEM: {error}"))?;
    if chain.is_empty() {
        return Err("the certificate file holds no certificate".to_owned());
    }
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| format!("the key is not PEM: {error}"))?;
    CertifiedKey::from_der(chain, key, provider).map_err(|error| match error {
        Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => "the key is not that of the certificate".to_owned(),
        other => format!("certificate and key cannot be used: {other}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_the_files_is_said() {
        for (certificate, key, expected) in [
            (&b""[..], &b""[..], "holds no certificate"),
            (b"-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n", b"", "the certificate is not PEM"),
            (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", b"nothing", "the key is not PEM"),
        ] {
            let fault = Tls::new(certificate, key).expect_err(expected);
            assert!(fault.contains(expected), "{fault}");
        }
    }
}
