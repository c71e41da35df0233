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
)

// authority signs the certificates of one cluster, for servers and for clients.
type authority struct {
	directory   string
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	serial      int64
}

// newAuthority makes a certificate authority that keeps its files in directory.
func newAuthority(directory string) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key of the certificate authority: %w", err)
	}
	a := &authority{directory: directory, key: key}
	template := a.template("cluster")
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage |= x509.KeyUsageCertSign
	a.certificate = template
	if _, err := a.issue("ca", template, key); err != nil {
		return nil, err
	}
	return a, nil
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
func (a *authority) client(file, user string, groups ...string) (pair, error) {
	return a.leaf(file, a.template(user, groups...))
}

// server issues the certificate of a server with these names and addresses.
func (a *authority) server(file string, names []string, addresses ...netip.Addr) (pair, error) {
	template := a.template(file)
	template.DNSNames = names
	for _, address := range addresses {
		template.IPAddresses = append(template.IPAddresses, net.IP(address.AsSlice()))
	}
	return a.leaf(file, template)
}

func (a *authority) leaf(file string, template *x509.Certificate) (pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return pair{}, fmt.Errorf("make key %s: %w", file, err)
	}
	return a.issue(file, template, key)
}

// issue writes FILE.crt and FILE.key.
func (a *authority) issue(file string, template *x509.Certificate, key *ecdsa.PrivateKey) (pair, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, &key.PublicKey, a.key)
	if err != nil {
		return pair{}, fmt.Errorf("issue certificate %s: %w", file, err)
	}
	secret, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return pair{}, fmt.Errorf("encode key %s: %w", file, err)
	}
	p := pair{certificate: a.path(file + ".crt"), key: a.path(file + ".key")}
	for path, block := range map[string]*pem.Block{
		p.certificate: {Type: "CERTIFICATE", Bytes: der},
		p.key:         {Type: "EC PRIVATE KEY", Bytes: secret},
	} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			return pair{}, fmt.Errorf("write certificate %s: %w", file, err)
		}
	}
	return p, nil
}

// kubeconfig writes a user's kubeconfig for the server and returns its path.
func (a *authority) kubeconfig(server, user string, groups ...string) (string, error) {
	file := strings.NewReplacer(":", "-").Replace(user)
	p, err := a.client(file, user, groups...)
	if err != nil {
		return "", err
	}
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: u, user: {client-certificate: %q, client-key: %q}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
`, server, a.caFile(), p.certificate, p.key)
	path := a.path(file + ".kubeconfig")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return "", fmt.Errorf("write kubeconfig of %s: %w", user, err)
	}
	return path, nil
}
