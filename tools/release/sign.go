// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Files of a release beside the artefacts.
const (
	sumsFile      = "SHA256SUMS"
	publicKeyFile = "ip-masq.pub" // for minisign
)

// sign writes the sums of all files, and with a key their signature, by minisign(1).
func (r *release) sign(ctx context.Context) error {
	if r.key == "" {
		fmt.Fprintln(r.messages, "release: WARNING: without a key nothing is signed; this is no release to publish. `minisign -G -W` makes a key.")
		return r.writeSums()
	}
	if _, err := r.output(ctx, "minisign", "-R", "-s", r.key, "-p", filepath.Join(r.next, publicKeyFile)); err != nil {
		return err
	}
	if err := r.writeSums(); err != nil {
		return err
	}
	_, err := r.output(ctx, "minisign", "-S", "-s", r.key, "-m", filepath.Join(r.next, sumsFile),
		"-c", "signature of "+sumsFile+": minisign -V -p "+publicKeyFile+" -m "+sumsFile, "-t", fmt.Sprintf("%s %s commit %s", project, r.version, r.commit))
	return err
}

// writeSums writes what `sha256sum *` prints.
func (r *release) writeSums() error {
	entries, err := os.ReadDir(r.next)
	if err != nil {
		return err
	}
	var text strings.Builder
	for _, entry := range entries {
		data, err := os.ReadFile(filepath.Join(r.next, entry.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&text, "%s  %s\n", sumOf(data), entry.Name())
	}
	return r.write(sumsFile, []byte(text.String()))
}
