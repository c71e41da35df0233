// SPDX-License-Identifier: Apache-2.0

package podinfo

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

const conflist = `{"cniVersion": "1.0.0", "name": "podnet", "plugins": [{"type": "bridge", "mtu": 1500}, {"type": "portmap"}]}`

// file returns a file of the cache as libcni writes it.
func file(netNS, args, result string) string {
	return fmt.Sprintf(`{"kind":"cniCacheV1","containerId":"c0ffee","config":"%s","ifName":"eth0","networkName":"podnet","netns":"%s","cniArgs":%s,`+
		`"capabilityArgs":{"portMappings":[]},"result":%s}`, base64.StdEncoding.EncodeToString([]byte(conflist)), netNS, args, result)
}

const (
	args   = `[["IgnoreUnknown","1"],["K8S_POD_NAMESPACE","prod"],["K8S_POD_NAME","web-0"],["K8S_POD_INFRA_CONTAINER_ID","c0ffee"],["K8S_POD_UID","u"]]`
	result = `{"cniVersion":"1.0.0","dns":{},"interfaces":[{"mac":"aa:aa:aa:aa:aa:aa","name":"cni0"},{"mac":"bb:bb:bb:bb:bb:bb","name":"eth0","sandbox":"/run/netns/x"}],` +
		`"ips":[{"address":"10.1.0.5/16","gateway":"10.1.0.1","interface":1},{"address":"fd00::5/64","interface":1},{"address":"fe80::5/64","interface":1}]}`
)

func addrs(texts ...string) (all []netip.Addr) {
	for _, s := range texts {
		all = append(all, netip.MustParseAddr(s))
	}
	return all
}

// TestDecode: what runtimes write, and what is refused.
func TestDecode(t *testing.T) {
	const name = "podnet-c0ffee-eth0"
	good := file("/run/netns/x", args, result)
	for _, c := range []struct {
		what, text, file string
		namespace, pod   string
		addresses        []netip.Addr
		refused          string
	}{
		{what: "libcni since 1.2", text: good, namespace: "prod", pod: "web-0", addresses: addrs("10.1.0.5", "fd00::5")},
		{what: "containerd 2", text: strings.Replace(strings.Replace(good, `"cniVersion":"1.0.0"`, `"cniVersion":"1.1.0"`, 1), `"name":"eth0"`, `"name":"eth0","mtu":1500`, 1),
			namespace: "prod", pod: "web-0", addresses: addrs("10.1.0.5", "fd00::5")},
		{what: "libcni before 1.2", text: strings.Replace(good, `"netns":"/run/netns/x",`, "", 1), namespace: "prod", pod: "web-0", addresses: addrs("10.1.0.5", "fd00::5")},
		{what: "0.3.1", text: file("/run/netns/x", args, `{"cniVersion":"0.3.1","interfaces":[{"name":"eth0","sandbox":"s"}],"ips":[{"version":"4","interface":0,"address":"10.1.0.5/16"}],"dns":{}}`),
			namespace: "prod", pod: "web-0", addresses: addrs("10.1.0.5")},
		{what: "CRI-O, which adds its own CNI_ARGS", text: file("/run/netns/x", strings.Replace(args, `]]`, `],["K8S_POD_NAMESPACE","prod"],["IP","10.1.0.5"]]`, 1), result),
			namespace: "prod", pod: "web-0", addresses: addrs("10.1.0.5", "fd00::5")},
		{what: "two namespaces", text: file("/run/netns/x", strings.Replace(args, `]]`, `],["K8S_POD_NAMESPACE","dev"]]`, 1), result),
			pod: "web-0", addresses: addrs("10.1.0.5", "fd00::5")},
		{what: "a namespace in another value", text: file("/run/netns/x", `[["K8S_POD_NAMESPACE","prod"],["X","1;K8S_POD_NAMESPACE=dev"]]`, result),
			addresses: addrs("10.1.0.5", "fd00::5")},
		{what: "no Kubernetes names", text: file("/run/netns/x", `[["K8S_POD_NAMESPACE","Prod"],["K8S_POD_NAME","../x"]]`, result), addresses: addrs("10.1.0.5", "fd00::5")},
		{what: "podman", text: file("/run/netns/x", `null`, result), addresses: addrs("10.1.0.5", "fd00::5")},

		{what: "torn", text: good[:len(good)-1], refused: "unexpected end"},
		{what: "empty", text: "", refused: "unexpected end"},
		{what: "a result alone, as old versions wrote", text: result, refused: "kind"},
		{what: "another file", text: good, file: "podnet-c0ffee-eth1", refused: "names"},
		{what: "a name with a line feed", text: strings.Replace(good, `"c0ffee","config"`, `"c0\nffee","config"`, 1), refused: "containerID"},
		{what: "no network namespace", text: file("", args, strings.Replace(result, `"/run/netns/x"`, `""`, 1)), refused: "netns"},
		{what: "no interface", text: file("", args, `{"cniVersion":"1.0.0","ips":[{"address":"10.1.0.5/16"}]}`), refused: "netns"},
		{what: "another interface of the pod", text: file("", args, strings.Replace(result, `"eth0"`, `"eth1"`, 1)), refused: "netns"},
		{what: "a sandbox that is no path", text: file("", args, strings.Replace(result, `"/run/netns/x"`, `"vm-1"`, 1)), refused: "netns"},
		{what: "a relative network namespace", text: file("x", args, result), refused: "netns"},
		{what: "no result", text: file("/run/netns/x", args, `null`), refused: "result"},
		{what: "a result of another version", text: file("/run/netns/x", args, `{"cniVersion":"9.0.0"}`), refused: "result"},
	} {
		if c.file == "" {
			c.file = name
		}
		got, netNS, err := decode([]byte(c.text), c.file)
		if c.refused != "" {
			if err == nil || !strings.Contains(err.Error(), c.refused) {
				t.Errorf("%s: %v, want %q", c.what, err, c.refused)
			}
			continue
		}
		want := Cached{Network: "podnet", ContainerID: "c0ffee", IfName: "eth0", Namespace: c.namespace, Name: c.pod, Addresses: c.addresses, Config: []byte(conflist)}
		if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" || err != nil || netNS != "/run/netns/x" {
			t.Errorf("%s: %v, %q (-want +got):\n%s", c.what, err, netNS, diff)
		}
	}
}

// TestRealFiles: files that containerd wrote. The older libcni of containerd 1 names the network namespace in the result only.
func TestRealFiles(t *testing.T) {
	for runtime, c := range map[string]struct{ container, netNS string }{
		"containerd-1.6": {"8452259a4d8898cc0cb149279fe7693b402381b4737e36fee2a049578bb6ac93", "cni-789585f0-35fd-db49-c490-6b0c8b521ed5"},
		"containerd-2.4": {"9261264d8a91e0511a094cb1675a6b5680bdae240b0788105e6cdd87970830fc", "cni-6b9143d4-1a50-4918-c84c-32e4cfbb66a5"},
	} {
		text, err := os.ReadFile("testdata/" + runtime + ".json")
		if err != nil {
			t.Fatal(err)
		}
		got, netNS, err := decode(text, "pods-"+c.container+"-eth0")
		want := Cached{Network: "pods", ContainerID: c.container, IfName: "eth0", Namespace: "prod", Name: "one", Addresses: addrs("10.1.0.2", "fd00:1::2")}
		diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{}), cmpopts.IgnoreFields(Cached{}, "Config"))
		if diff != "" || err != nil || netNS != "/run/containerd/io.containerd.grpc.v1.cri/netns/"+c.netNS || !got.SameConfig(got.Config, "ip-masq") {
			t.Errorf("%s: %v, %q (-want +got):\n%s", runtime, err, netNS, diff)
		}
	}
}

// TestReadCache: which files of a cache count, and what is said of the others.
func TestReadCache(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "results")
	run := filepath.Join(t.TempDir(), "netns")
	netNS, path := filepath.Join(run, "ns"), filepath.Join(dir, "podnet-c0ffee-eth0")
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	write := func(path, text string) {
		t.Helper()
		do(os.WriteFile(path, []byte(text), 0o600))
	}
	// read wants that the file says nothing about the pod, for a reason, or "" that it has the pod.
	read := func(what, reason string) {
		t.Helper()
		x, err := ReadCached(path)
		unreadable, is := errors.AsType[*UnreadableError](err)
		switch {
		case reason == "" && (err != nil || x.Namespace != "prod"):
			t.Errorf("%s: %+v, %v", what, x, err)
		case reason != "" && !is:
			t.Errorf("%s: %v, want an UnreadableError", what, err)
		case reason != "" && !strings.Contains(unreadable.Reason, reason):
			t.Errorf("%s: %q, want %q", what, unreadable.Reason, reason)
		}
	}
	readError := func(what string, want error) {
		t.Helper()
		if _, err := ReadCached(path); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	if files, err := CacheFiles(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no directory: %v, %v", files, err)
	}
	do(os.Mkdir(dir, 0o700))
	do(os.Mkdir(run, 0o700))
	do(os.Symlink("/proc/self/ns/net", netNS)) // a file of nsfs, as a mounted namespace
	readError("no file", fs.ErrNotExist)
	write(path, file(netNS, args, result))
	written := time.Now().Add(-20 * 365 * 24 * time.Hour)
	do(os.Chtimes(path, written, written))
	read("a file, whatever its time", "")
	do(os.Mkdir(filepath.Join(dir, "directory"), 0o700))
	if files, err := CacheFiles(dir); len(files) != 1 || !files[filepath.Base(path)].Equal(written) || err != nil {
		t.Errorf("%v, %v", files, err)
	}
	for mode, reason := range map[os.FileMode]string{0o644: "", 0o664: "mode 0664", 0o602: "mode 0602", 0o600: ""} {
		do(os.Chmod(path, mode))
		read(mode.String(), reason)
	}
	do(os.Chmod(path, 0o600))
	do(os.Chown(path, 1, 0))
	read("of another user", "root")
	do(os.Chown(path, 0, 1))
	read("of another group", "")

	do(os.Remove(netNS))
	readError("without its network namespace", ErrNoNetNS)
	write(netNS, "")
	read("without a network namespace at its path", "network namespace cannot be read")
	do(os.RemoveAll(run))
	read("without the directory of its network namespace", "does not exist here")
	write(run, "")
	read("with a file in place of that directory", "network namespace cannot be read")
	write(path, file("/proc/self/ns/net", args, result))
	read("a network namespace named by a process", "by a process")
	write(path, file("/proc/1073741824/ns/net", args, result))
	read("one named by a process that has ended", "by a process")

	write(path, file(netNS, args, result)[:50])
	read("a torn file", "incomplete")
	write(path, file(netNS, args, result)+strings.Repeat(" ", maxCached))
	read("a large file", "cannot be read")
	moved := filepath.Join(t.TempDir(), "file")
	do(os.Rename(path, moved))
	do(os.Symlink(moved, path))
	read("a symlink", "not a regular file")
	do(os.Remove(path))
	do(os.Mkdir(path, 0o700))
	read("a directory", "not a regular file")
}

// TestInFileName: the attachments that the name of a file may mean.
func TestInFileName(t *testing.T) {
	for name, want := range map[string]string{
		"pods-c0ffee-eth0":        "[pods c0ffee eth0]",
		"k8s-pod-net-c0ffee-net1": "[k8s pod-net-c0ffee net1][k8s-pod net-c0ffee net1][k8s-pod-net c0ffee net1]",
		"pods-eth0":               "",
		"nothing":                 "",
		"":                        "",
		"-c0ffee-eth0":            "",
		"pods--eth0":              "[pods  eth0]",
	} {
		var got string
		for _, x := range InFileName(name) {
			got += fmt.Sprintf("[%s %s %s]", x.Network, x.ContainerID, x.IfName)
			if x.File() != name {
				t.Errorf("%s: %s", name, x.File())
			}
		}
		if got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

// TestSameConfig: a runtime had the conflist of now, before the plugin entry was in it or with it.
func TestSameConfig(t *testing.T) {
	const now = `{"name": "podnet", "cniVersion": "1.0.0", "plugins": [{"mtu": 1500, "type": "bridge"}, {"type": "portmap"}, {"type": "ip-masq", "masqLinkLocal": true}]}`
	for had, want := range map[string]bool{
		conflist: true,
		now:      true,
		strings.Replace(conflist, "1500", "9000", 1):              false,
		strings.Replace(now, "true", "false", 1):                  false,
		strings.Replace(conflist, `, {"type": "portmap"}`, "", 1): false,
		"null": false, "[]": false, "": false,
	} {
		if got := (Cached{Config: []byte(had)}).SameConfig([]byte(now), "ip-masq"); got != want {
			t.Errorf("%s: %t, want %t", had, got, want)
		}
	}
	if (Cached{Config: []byte("{")}).SameConfig([]byte("{"), "ip-masq") {
		t.Error("what cannot be read is equal")
	}
}

func FuzzDecode(f *testing.F) {
	good := file("/run/netns/x", args, result)
	for _, seed := range []string{good, file("", args, result), good[:100], result, file("/x", "null", `{"cniVersion":"0.2.0","ip4":{"ip":"10.1.0.5/16"}}`), file("/x", args, `{"cniVersion":"1.0.0","ips":[null],"interfaces":[null]}`)} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, netNS, err := decode(data, "podnet-c0ffee-eth0")
		if err != nil {
			return
		}
		if c.Network+"-"+c.ContainerID+"-"+c.IfName != "podnet-c0ffee-eth0" || !filepath.IsAbs(netNS) || len(c.Addresses) > MaxAddresses {
			t.Errorf("%+v in %q", c, netNS)
		}
		for _, a := range c.Addresses {
			if !a.IsValid() || a.IsLinkLocalUnicast() || a.Is4In6() {
				t.Errorf("address %s", a)
			}
		}
	})
}
