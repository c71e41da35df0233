// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// authority signs the certificates of one cluster, for servers and for clients.
type authority struct {
	directory   string
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	serial      int64
}

// newAuthority makes a certificate authority that keeps its files in directory.
func newAuthority(t T, directory string) *authority {
	key := assert.Must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	a := &authority{directory: directory, key: key}
	template := a.template("cluster")
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage |= x509.KeyUsageCertSign
	a.certificate = template
	a.issue(t, "ca", template, key)
	return a
}

func (a *authority) template(name string, groups ...string) *x509.Certificate {
	a.serial++
	return &x509.Certificate{
		SerialNumber: big.NewInt(a.serial),
		Subject:      pkix.Name{CommonName: name, Organization: groups},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(24 * time.Hour),
		KeyUsage:     x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
}

// pair names the files of a certificate and its key, PEM.
type pair struct{ certificate, key string }

func (a *authority) path(file string) string { return filepath.Join(a.directory, file) }

// caFile returns the path of the CA certificate.
func (a *authority) caFile() string { return a.path("ca.crt") }

// client issues the certificate of a user in these groups.
func (a *authority) client(t T, file, user string, groups ...string) pair {
	return a.leaf(t, file, a.template(user, groups...))
}

// server issues the certificate of a server with these names and addresses.
func (a *authority) server(t T, file string, names []string, addresses ...netip.Addr) pair {
	template := a.template(file)
	template.DNSNames = names
	for _, address := range addresses {
		template.IPAddresses = append(template.IPAddresses, net.IP(address.AsSlice()))
	}
	return a.leaf(t, file, template)
}

func (a *authority) leaf(t T, file string, template *x509.Certificate) pair {
	return a.issue(t, file, template, assert.Must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t))
}

// issue writes FILE.crt and FILE.key.
func (a *authority) issue(t T, file string, template *x509.Certificate, key *ecdsa.PrivateKey) pair {
	der := assert.Must(x509.CreateCertificate(rand.Reader, template, a.certificate, &key.PublicKey, a.key))(t)
	secret := assert.Must(x509.MarshalECPrivateKey(key))(t)
	p := pair{certificate: a.path(file + ".crt"), key: a.path(file + ".key")}
	for path, block := range map[string]*pem.Block{
		p.certificate: {Type: "CERTIFICATE", Bytes: der},
		p.key:         {Type: "EC PRIVATE KEY", Bytes: secret},
	} {
		assert.NoError(t, os.WriteFile(path, pem.EncodeToMemory(block), 0o600))
	}
	return p
}

// kubeconfig writes a user's kubeconfig for the server and returns its path.
func (a *authority) kubeconfig(t T, server, user string, groups ...string) string {
	file := strings.NewReplacer(":", "-").Replace(user)
	p := a.client(t, file, user, groups...)
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: u, user: {client-certificate: %q, client-key: %q}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
`, server, a.caFile(), p.certificate, p.key)
	path := a.path(file + ".kubeconfig")
	assert.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}
