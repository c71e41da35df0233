// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"aead.dev/minisign"
	"github.com/secure-systems-lab/go-securesystemslib/dsse"
	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/v2_3"
)

// verification is a check of a release.
type verification struct {
	dir, publicKey string
	unsigned       bool // accept a release without knowing who made it
}

// errUnknownMaker is the error of a release that is right in itself, but no stated key says who made it.
var errUnknownMaker = errors.New("not verified who made the release, only that its files belong together; " +
	"state the project's key: -public-key FILE, make verify PUBLIC_KEY=FILE")

// verify checks that the key signed the sums, that the files are those of the sums, that the provenance is
// about these files, and that all artefacts have the programs that the SBOMs describe. With errUnknownMaker
// there is a report too.
func (v verification) verify(ctx context.Context) (string, error) {
	sums, err := os.ReadFile(filepath.Join(v.dir, sumsFile))
	if err != nil {
		return "", err
	}
	verifier, signed, err := v.verifySignature(sums)
	if err != nil {
		return "", err
	}
	if err := v.verifySums(string(sums)); err != nil {
		return "", err
	}
	about, err := v.verifyProvenance(ctx, verifier)
	if err != nil {
		return "", err
	}
	contents, err := v.verifyContents()
	if err != nil {
		return "", err
	}
	report := []string{signed, fmt.Sprintf("%s: %d files, each with the sum that is signed", sumsFile, strings.Count(string(sums), "\n")), about, contents}
	if _, err := os.Lstat(filepath.Join(v.dir, bundleFile)); err == nil {
		report = append(report, bundleFile+": not verified; cosign verify-blob does that")
	}
	if v.publicKey == "" && !v.unsigned {
		err = errUnknownMaker
	}
	return strings.Join(report, "\n"), err
}

// verifySignature verifies the signature of the sums. It returns the verifier for the provenance, nil if nothing is signed.
func (v verification) verifySignature(sums []byte) (*dsseKey, string, error) {
	signature, err := os.ReadFile(filepath.Join(v.dir, signatureFile))
	if errors.Is(err, os.ErrNotExist) && v.publicKey == "" {
		return nil, "NOT SIGNED: anybody can have made it", nil
	}
	if err != nil {
		return nil, "", err
	}
	path, origin := v.publicKey, v.publicKey
	if path == "" {
		path = filepath.Join(v.dir, publicKeyFile)
		origin = "the key in the release itself: anybody can have made it; compare " + publicKeyFile + " with the key that the project publishes"
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, "", err
	}
	key, raw, err := readPublicKey(text)
	if err != nil {
		return nil, "", fmt.Errorf("%s: %w", path, err)
	}
	var parsed minisign.Signature
	if err := parsed.UnmarshalText(signature); err != nil {
		return nil, "", fmt.Errorf("%s: %w", signatureFile, err)
	}
	canonical, err := parsed.MarshalText()
	if err != nil {
		return nil, "", err
	}
	// The untrusted comment is not signed, so it must be the usual one.
	if !minisign.Verify(key, sums, signature) || string(canonical) != string(signature) || parsed.UntrustedComment != untrustedComment {
		return nil, "", fmt.Errorf("%s is no signature of %s by %s", signatureFile, sumsFile, origin)
	}
	return &dsseKey{public: raw}, fmt.Sprintf("%s: signed by %s with %s", signatureFile, strings.ToUpper(fmt.Sprintf("%016x", key.ID())), origin), nil
}

// verifySums verifies that the files of the release are those of the sums.
func (v verification) verifySums(text string) error {
	have, err := sumsOf(v.dir)
	if err != nil {
		return err
	}
	want, err := parseSums(text)
	if err != nil {
		return err
	}
	var errs []error
	for _, f := range have {
		switch sum, known := want[f.name]; {
		case !known:
			errs = append(errs, fmt.Errorf("%s does not belong to the release", printable(f.name)))
		case sum != f.sum:
			errs = append(errs, fmt.Errorf("%s has been changed: its SHA-256 is %s, in %s %s", f.name, f.sum, sumsFile, sum))
		}
		delete(want, f.name)
	}
	for name := range want {
		errs = append(errs, fmt.Errorf("%s is missing", name))
	}
	return errors.Join(errs...)
}

// parseSums returns the sums of files by their names, which have no character that controls a terminal.
func parseSums(text string) (map[string]string, error) {
	sums := map[string]string{}
	for line := range strings.Lines(text) {
		m := regexp.MustCompile(`^([0-9a-f]{64})  ([\w.+~-]+)\n$`).FindStringSubmatch(line)
		if m == nil {
			return nil, fmt.Errorf("%s: %q is no line of sha256sum", sumsFile, line)
		}
		sums[m[2]] = m[1]
	}
	return sums, nil
}

// printable quotes a text that has more than printable characters.
func printable(text string) string {
	if quoted := strconv.Quote(text); quoted != `"`+text+`"` {
		return quoted
	}
	return text
}

// verifyProvenance verifies that the provenance is signed, and is about the artefacts.
func (v verification) verifyProvenance(ctx context.Context, key *dsseKey) (string, error) {
	files, err := filepath.Glob(filepath.Join(v.dir, "*"+provenanceType))
	if err != nil || len(files) != 1 {
		return "", fmt.Errorf("there are %d files with the provenance, want 1: %w", len(files), err)
	}
	data, err := os.ReadFile(files[0])
	if err != nil {
		return "", err
	}
	name := filepath.Base(files[0])
	var envelope dsse.Envelope
	if err := json.Unmarshal(data, &envelope); err != nil {
		return "", fmt.Errorf("%s: %w", name, err)
	}
	payload, err := envelope.DecodeB64Payload()
	if err == nil && key != nil {
		var verifier *dsse.EnvelopeVerifier
		if verifier, err = dsse.NewEnvelopeVerifier(key); err == nil {
			_, err = verifier.Verify(ctx, &envelope)
		}
	}
	if err != nil || envelope.PayloadType != payloadType {
		return "", fmt.Errorf("%s is not signed with the key of %s: %w", name, signatureFile, err)
	}
	s, p, err := parseProvenance(payload)
	if err != nil {
		return "", fmt.Errorf("%s is no provenance of SLSA: %w", name, err)
	}
	have, err := sumsOf(v.dir)
	if err != nil {
		return "", err
	}
	have = slices.DeleteFunc(have, func(f fileSum) bool { return !isArtefact(f.name) })
	var subjects []fileSum
	for _, subject := range s.GetSubject() {
		subjects = append(subjects, fileSum{subject.GetDigest()["sha256"], subject.GetName()})
	}
	if !slices.Equal(have, subjects) {
		return "", fmt.Errorf("%s is about\n%q\nthe artefacts are\n%q", name, subjects, have)
	}
	d := p.GetBuildDefinition()
	if len(d.GetResolvedDependencies()) == 0 {
		return "", fmt.Errorf("%s names no commit", name)
	}
	return fmt.Sprintf("%s: %s from commit %s, built by %s", name, printable(d.GetExternalParameters().GetFields()["version"].GetStringValue()),
		printable(d.GetResolvedDependencies()[0].GetDigest()["gitCommit"]), printable(p.GetRunDetails().GetBuilder().GetId())), nil
}

// verifyContents verifies that archives, packages and images have the programs that the SBOMs describe.
func (v verification) verifyContents() (string, error) {
	described := map[string]string{} // by ARCH/NAME
	files, err := filepath.Glob(filepath.Join(v.dir, "*"+sbomType))
	if err != nil {
		return "", err
	}
	for _, path := range files {
		f, err := os.Open(path)
		if err != nil {
			return "", err
		}
		var d v2_3.Document
		err = errors.Join(spdxjson.ReadInto(f, &d), f.Close())
		if err != nil {
			return "", fmt.Errorf("%s: %w", filepath.Base(path), err)
		}
		for _, p := range d.Packages {
			if p == nil || p.PrimaryPackagePurpose != "APPLICATION" || len(p.PackageChecksums) != 1 {
				continue
			}
			sum := p.PackageChecksums[0].Value
			if other, known := described[p.PackageFileName]; known && other != sum {
				return "", fmt.Errorf("the SBOMs differ about %s", printable(p.PackageFileName))
			}
			described[p.PackageFileName] = sum
		}
	}
	if len(described) == 0 {
		return "", errors.New("no SBOM describes a program")
	}
	entries, err := os.ReadDir(v.dir)
	if err != nil {
		return "", err
	}
	var digests []string
	containers := 0
	for _, entry := range entries {
		found, err := programsIn(filepath.Join(v.dir, entry.Name()))
		if err != nil {
			return "", fmt.Errorf("%s: %w", entry.Name(), err)
		}
		if found == nil {
			continue
		}
		containers++
		if isImage(entry.Name()) {
			digest, err := imageDigest(filepath.Join(v.dir, entry.Name()))
			if err != nil {
				return "", fmt.Errorf("%s: %w", entry.Name(), err)
			}
			digests = append(digests, fmt.Sprintf("%s: in a registry the image has the digest %s", entry.Name(), digest))
		}
		if !belongs(entry.Name(), found, described) {
			return "", fmt.Errorf("%s has the programs %q", entry.Name(), slices.Sorted(maps.Keys(found)))
		}
		for id, sum := range found {
			if described[id] != sum {
				return "", fmt.Errorf("%s has a program %s with SHA-256 %s; the SBOMs have %q", entry.Name(), id, sum, described[id])
			}
		}
	}
	return strings.Join(append(digests, fmt.Sprintf("%d archives, packages and images have the %d programs that %d SBOMs describe",
		containers, len(described), len(files))), "\n"), nil
}
