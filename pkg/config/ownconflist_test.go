// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// TestOwnConflistStale: a copy is stale once the file that it was made from is another one, or gone.
func TestOwnConflistStale(t *testing.T) {
	const pods, more = `{"name": "pods", "plugins": [{"type": "bridge"}]}`, `{"name": "more", "plugins": [{"type": "bridge"}]}`
	const copied = `{"name": "pods", "plugins": [{"type": "bridge"}, {"type": "ip-masq"}]}`
	for name, c := range map[string]struct {
		files         map[string]string // beside the copy
		removed, gone bool              // the copy, the file that it was made from
		says          string            // "" if it is not stale
	}{
		"as it was":              {files: map[string]string{"10-a.conflist": pods}},
		"beside other networks":  {files: map[string]string{"01-a.conflist": more, "10-a.conflist": pods, "20-a.conflist": more}},
		"beside loopback":        {files: map[string]string{"06-lo.conf": `{"name": "lo", "type": "loopback"}`, "10-a.conflist": pods}},
		"without the copy":       {removed: true},
		"another text":           {files: map[string]string{"10-a.conflist": pods + "\n"}, says: "which has changed since"},
		"another network":        {files: map[string]string{"10-a.conflist": more}, says: "which has changed since"},
		"a broken file":          {files: map[string]string{"10-a.conflist": "{"}, says: "which has changed since"},
		"another name":           {files: map[string]string{"20-a.conflist": pods}, says: "has another file now"},
		"a name before the copy": {files: map[string]string{"01-a.conflist": pods}, says: "has another file now"},
		"another file before":    {files: map[string]string{"07-x.conflist": more, "10-a.conflist": pods}, says: "has another file now"},
		"nothing":                {gone: true, says: "which is gone"},
		"another main plugin":    {files: map[string]string{"10-b.conflist": more}, gone: true, says: "which is gone"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			own := &OwnConflist{File: filepath.Join(dir, "05-ip-masq.conflist"), Main: filepath.Join(dir, "10-a.conflist"), Network: "pods", Digest: DigestOf([]byte(pods))}
			read := ConfDir{Dir: dir}
			if !c.removed {
				read = read.With(ParseConflist(own.File, []byte(copied)))
			}
			for file, text := range c.files {
				read = read.With(ParseConflist(filepath.Join(dir, file), []byte(text)))
			}
			err := own.Stale(read)
			if (err != nil) != (c.says != "") || errors.Is(err, ErrMainGone) != c.gone {
				t.Fatal(err)
			}
			if err != nil && (!strings.Contains(err.Error(), c.says) || !strings.HasPrefix(err.Error(), own.File+" is a copy of "+own.Main)) {
				t.Errorf("%v, want %q", err, c.says)
			}
		})
	}
	assert.NoError(t, (*OwnConflist)(nil).Stale(ConfDir{}))
}
