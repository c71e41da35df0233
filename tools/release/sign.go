// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"aead.dev/minisign"
	provenance "github.com/in-toto/attestation/go/predicates/provenance/v1"
	statement "github.com/in-toto/attestation/go/v1"
	"github.com/secure-systems-lab/go-securesystemslib/dsse"
	"google.golang.org/protobuf/encoding/protojson"
)

// Files of a release beside the artefacts.
const (
	sumsFile      = "SHA256SUMS"
	signatureFile = sumsFile + ".minisig"
	bundleFile    = sumsFile + ".sigstore.json" // cosign's, which the workflow adds to a release on GitHub
	publicKeyFile = "ip-masq.pub"               // for minisign
	pemFile       = "ip-masq.pem"               // the same key for cosign and others that read a DSSE envelope

	// The builder in the provenance.
	builder = "https://github.com/ip-masq/ip-masq-cni/tools/release"

	untrustedComment = "signature of " + sumsFile + ": minisign -V -p " + publicKeyFile + " -m " + sumsFile

	provenanceType = ".intoto.jsonl"
	payloadType    = "application/vnd.in-toto+json"
	predicateType  = "https://slsa.dev/provenance/v1"
	buildType      = source + "/tree/main/tools/release"
)

// keyPair signs with one Ed25519 key, in the forms of minisign and of DSSE.
type keyPair struct {
	minisign minisign.PrivateKey
	private  ed25519.PrivateKey
}

// generateKey writes a key to sign with, and its public key to FILE.pub. A key that is there stays.
func generateKey(path string) error {
	public, private, err := minisign.GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	secret, err := private.MarshalText()
	if err != nil {
		return err
	}
	text, err := public.MarshalText()
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(secret, '\n'))
	return errors.Join(err, f.Close(), os.WriteFile(path+".pub", append(text, '\n'), 0o644))
}

// readKey returns nil for "".
func readKey(path string) (*keyPair, error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	k := &keyPair{}
	if err := k.minisign.UnmarshalText(text); err != nil {
		return nil, fmt.Errorf("%s: %w; `release keygen` makes a key that is not encrypted: keep it on encrypted storage", path, err)
	}
	// minisign(1), "Secret key format": the key begins at byte 62.
	raw, err := lastLine(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	k.private = ed25519.PrivateKey(raw[62 : 62+ed25519.PrivateKeySize])
	return k, nil
}

// lastLine decodes the last line of a file of minisign.
func lastLine(text []byte) ([]byte, error) {
	trimmed := strings.TrimSpace(string(text))
	return base64.StdEncoding.DecodeString(trimmed[strings.LastIndexByte(trimmed, '\n')+1:])
}

// readPublicKey reads a public key in the form of minisign.
func readPublicKey(text []byte) (minisign.PublicKey, ed25519.PublicKey, error) {
	var key minisign.PublicKey
	if err := key.UnmarshalText(text); err != nil {
		return key, nil, err
	}
	raw, err := lastLine(text)
	if err != nil || len(raw) != 2+8+ed25519.PublicKeySize {
		return key, nil, fmt.Errorf("no public key of minisign: %w", err)
	}
	return key, raw[2+8:], nil
}

// dsseKey signs and verifies as DSSE wants it.
type dsseKey struct {
	private ed25519.PrivateKey // nil: verifies only
	public  ed25519.PublicKey
}

func (k dsseKey) Sign(_ context.Context, data []byte) ([]byte, error) {
	return ed25519.Sign(k.private, data), nil
}

func (k dsseKey) Verify(_ context.Context, data, signature []byte) error {
	if !ed25519.Verify(k.public, data, signature) {
		return errors.New("the signature is not that of this key")
	}
	return nil
}

func (k dsseKey) KeyID() (string, error)   { return dsse.SHA256KeyID(k.public) }
func (k dsseKey) Public() crypto.PublicKey { return k.public }

// sign writes the provenance of all artefacts, the sums of all files, and signatures of both.
func (r *release) sign(ctx context.Context, keys *keyPair) error {
	payload, err := r.provenance(ctx)
	if err != nil {
		return fmt.Errorf("write the provenance: %w", err)
	}
	envelope := &dsse.Envelope{PayloadType: payloadType, Payload: base64.StdEncoding.EncodeToString(payload), Signatures: []dsse.Signature{}}
	if keys == nil {
		fmt.Fprintln(r.messages, "release: WARNING: without a key nothing is signed; this is no release to publish. `release keygen FILE` makes a key.")
	} else {
		public, ok := keys.private.Public().(ed25519.PublicKey)
		if !ok {
			return errors.New("the key is not one of Ed25519")
		}
		signer, err := dsse.NewEnvelopeSigner(dsseKey{keys.private, public})
		if err != nil {
			return err
		}
		if envelope, err = signer.SignPayload(ctx, payloadType, payload); err != nil {
			return err
		}
		if err := r.writeKeys(keys, public); err != nil {
			return err
		}
	}
	line, err := json.Marshal(envelope)
	if err != nil {
		return err
	}
	if err := r.write(fmt.Sprintf("%s_%s%s", project, r.number, provenanceType), append(line, '\n')); err != nil {
		return err
	}
	return r.writeSums(keys)
}

// writeSums writes the sums of all files, and their signature.
func (r *release) writeSums(keys *keyPair) error {
	sums, err := sumsOf(r.next)
	if err != nil {
		return err
	}
	var text strings.Builder
	for _, s := range sums {
		fmt.Fprintf(&text, "%s  %s\n", s.sum, s.name)
	}
	if err := r.write(sumsFile, []byte(text.String())); err != nil || keys == nil {
		return err
	}
	return r.write(signatureFile, minisign.SignWithComments(keys.minisign, []byte(text.String()),
		fmt.Sprintf("%s %s commit %s", project, r.version, r.commit), untrustedComment))
}

func (r *release) writeKeys(keys *keyPair, public ed25519.PublicKey) error {
	key, ok := keys.minisign.Public().(minisign.PublicKey)
	if !ok {
		return errors.New("minisign has no public key for this key")
	}
	text, err := key.MarshalText()
	if err != nil {
		return err
	}
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		return err
	}
	return errors.Join(r.write(publicKeyFile, append(text, '\n')), r.write(pemFile, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})))
}

// fileSum is a line of SHA256SUMS.
type fileSum struct{ sum, name string }

// sumsOf returns the sums of the files of a release, but not of the sums and their signatures.
func sumsOf(dir string) ([]fileSum, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var sums []fileSum
	for _, entry := range entries {
		if !entry.Type().IsRegular() {
			return nil, fmt.Errorf("%s is not a regular file", printable(entry.Name()))
		}
		if isSums(entry.Name()) {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		if err != nil {
			return nil, err
		}
		sums = append(sums, fileSum{sumOf(data), entry.Name()})
	}
	return sums, nil
}

// isSums reports whether a file is that of the sums, or a signature of it.
func isSums(name string) bool {
	return slices.Contains([]string{sumsFile, signatureFile, bundleFile}, name)
}

// isArtefact reports whether the provenance names a file: all but itself and the keys.
func isArtefact(name string) bool {
	return name != publicKeyFile && name != pemFile && !strings.HasSuffix(name, provenanceType)
}

// object is an object of JSON.
type object = map[string]any

// provenance returns the statement of in-toto about the artefacts, with the predicate of SLSA.
func (r *release) provenance(ctx context.Context) ([]byte, error) {
	sums, err := sumsOf(r.next)
	if err != nil {
		return nil, err
	}
	var subjects []object
	for _, f := range sums {
		if isArtefact(f.name) {
			subjects = append(subjects, object{"name": f.name, "digest": object{"sha256": f.sum}})
		}
	}
	toolchain, err := r.output(ctx, "go", "env", "GOVERSION")
	if err != nil {
		return nil, err
	}
	uri := "git+" + source
	if r.tagged {
		uri += "@refs/tags/" + r.version
	}
	dependencies := []object{
		{"uri": uri, "digest": object{"gitCommit": r.commit}},
		{"name": "go", "uri": "https://go.dev/dl/#" + toolchain, "annotations": object{"host": runtime.GOOS + "/" + runtime.GOARCH}},
	}
	for _, name := range []string{"go.mod", "go.sum"} {
		data, err := os.ReadFile(filepath.Join(r.root, name))
		if err != nil {
			return nil, err
		}
		dependencies = append(dependencies, object{"name": name, "digest": object{"sha256": sumOf(data)}})
	}
	var images []object
	for _, iptables := range []bool{false, true} {
		name := r.imageFile(iptables)
		digest, err := imageDigest(filepath.Join(r.next, name))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		images = append(images, object{"name": r.imageName(iptables), "digest": object{"sha256": strings.TrimPrefix(digest, "sha256:")}})
	}
	text, err := json.Marshal(object{
		"_type": statement.StatementTypeUri, "subject": subjects, "predicateType": predicateType,
		"predicate": object{
			"buildDefinition": object{
				"buildType":            buildType,
				"externalParameters":   object{"version": r.version, "architectures": r.arches, "image": r.image, "iptablesImage": r.debs != ""},
				"internalParameters":   object{"sourceDateEpoch": r.time.Unix(), "buildFlags": r.flags()},
				"resolvedDependencies": dependencies,
			},
			"runDetails": object{"builder": object{"id": builder}, "byproducts": images},
		},
	})
	if err != nil {
		return nil, err
	}
	_, _, err = parseProvenance(text)
	return text, err
}

// parseProvenance returns a statement of in-toto and its predicate of SLSA, if both are valid.
func parseProvenance(text []byte) (*statement.Statement, *provenance.Provenance, error) {
	s, p := &statement.Statement{}, &provenance.Provenance{}
	if err := protojson.Unmarshal(text, s); err != nil {
		return nil, nil, err
	}
	if s.GetPredicateType() != predicateType {
		return nil, nil, fmt.Errorf("the predicate is %q", s.GetPredicateType())
	}
	predicate, err := protojson.Marshal(s.GetPredicate())
	if err == nil {
		err = protojson.Unmarshal(predicate, p)
	}
	return s, p, errors.Join(err, s.Validate(), p.Validate())
}
