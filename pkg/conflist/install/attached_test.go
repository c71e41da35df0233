// SPDX-License-Identifier: Apache-2.0

package install

import (
	"encoding/base64"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const results = "/var/lib/cni/results"

// cached is a file of libcni's cache.
func cached(t *testing.T, id, netns, list string) string {
	t.Helper()
	text, err := json.Marshal(map[string]any{
		"kind": "cniCacheV1", "containerId": id, "config": base64.StdEncoding.EncodeToString([]byte(list)), "ifName": "eth0",
		"networkName": "podnet", "netns": netns, "result": map[string]any{"cniVersion": "1.0.0", "dns": map[string]any{}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestAttached(t *testing.T) {
	with, without := conf("bridge", "ip-masq"), conf("bridge", "ip-masq-of-others")
	root := node(t, map[string]string{
		results + "/podnet-a-eth0":      cached(t, "a", "/run/netns/a", with),
		results + "/podnet-b-eth0":      cached(t, "b", "/run/netns/b", without),
		results + "/podnet-c-eth0":      cached(t, "c", "/run/netns/c", with), // containerd's
		results + "/podnet-old-eth0":    cached(t, "old", "/run/netns/old", with),
		results + "/podnet-older-eth0":  cached(t, "older", "", with),
		results + "/podnet-lives-eth0":  cached(t, "lives", "/run/netns/lives", with),
		results + "/podnet-legacy-eth0": `{"cniVersion": "0.2.0", "ip4": {"ip": "10.0.0.1/24"}}`,
		results + "/torn":               cached(t, "torn", "", with)[:100],
		results + "/text":               "ip-masq",
		results + "/empty":              "",
		results + "/directory/file":     cached(t, "d", "", with),
		"/var/lib/cni/multus/f00":       `[{"Conf": {"type": "sriov"}}, {"ConfList": {"name": "podnet", "plugins": [{"type": "bridge"}, {"type": "ip-masq"}]}}]`,
		"/var/lib/cni/multus/f01":       `[{"Conf": {"type": "sriov"}, "Bytes": "` + base64.StdEncoding.EncodeToString([]byte(without)) + `"}]`,
		"/run/netns/a":                  "", "/run/netns/lives": "",
		"/run/containerd/io.containerd.runtime.v2.task/k8s.io/c/init.pid": "1",
	})
	before := time.Unix(86400, 0)
	for _, name := range []string{"old", "older", "lives"} {
		touch(t, filepath.Join(root, results, "podnet-"+name+"-eth0"), before)
	}
	touch(t, filepath.Join(root, results, "torn"), before)
	touch(t, filepath.Join(root, results, "text"), before)
	touch(t, filepath.Join(root, results, "empty"), before)
	have, err := Attached(root)
	if err != nil {
		t.Fatal(err)
	}
	want := []Attachment{
		{"a", "eth0", "podnet", filepath.Join(root, results, "podnet-a-eth0")},
		{"lives", "eth0", "podnet", filepath.Join(root, results, "podnet-lives-eth0")},
		{"f00", "", "", filepath.Join(root, "/var/lib/cni/multus/f00")},
	}
	if d := cmp.Diff(want, have); d != "" {
		t.Error(d)
	}

	// What is being written may be one.
	touch(t, filepath.Join(root, results, "torn"), time.Now())
	if _, err := Attached(root); err == nil || !strings.Contains(err.Error(), "torn is being written") {
		t.Error(err)
	}
	// One of a time to come, as where the clock was set back, never would be written.
	touch(t, filepath.Join(root, results, "torn"), time.Now().Add(time.Hour))
	if _, err := Attached(root); err != nil {
		t.Error(err)
	}
	if have, err := Attached(t.TempDir()); have != nil || err != nil {
		t.Errorf("on a node without caches: %v, %v", have, err)
	}
}

func touch(t *testing.T, path string, at time.Time) {
	t.Helper()
	if err := os.Chtimes(path, at, at); err != nil {
		t.Fatal(err)
	}
}
