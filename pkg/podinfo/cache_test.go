// SPDX-License-Identifier: Apache-2.0

package podinfo

import (
	"encoding/base64"
	"fmt"
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

// TestReadCache: which files count.
func TestReadCache(t *testing.T) {
	dir, netNS := filepath.Join(t.TempDir(), "results"), filepath.Join(t.TempDir(), "ns")
	path := filepath.Join(dir, "podnet-c0ffee-eth0")
	boot := time.Now().Add(-time.Hour)
	read := func(what string, namespaces ...string) {
		t.Helper()
		files, err := CacheFiles(dir, boot)
		var got []string
		for name := range files {
			if x, err := ReadCached(filepath.Join(dir, name)); err == nil {
				got = append(got, x.Namespace)
			}
		}
		if err != nil || fmt.Sprint(got) != fmt.Sprint(namespaces) {
			t.Errorf("%s: %q, %v; want %q", what, got, err, namespaces)
		}
	}
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	write := func(path, text string) { do(os.WriteFile(path, []byte(text), 0o600)) }
	read("no directory")
	do(os.Mkdir(dir, 0o700))
	read("an empty directory")
	do(os.Symlink("/proc/self/ns/net", netNS))
	write(path, file(netNS, args, result))
	read("a file", "prod")
	write(path, file(netNS, args, result)[:50])
	read("a torn file")
	write(path, file(netNS, strings.ReplaceAll(args, "prod", "dev"), result))
	read("another text", "dev")
	for mode, counts := range map[os.FileMode]bool{0o644: true, 0o620: false, 0o602: false, 0o600: true} {
		do(os.Chmod(path, mode))
		if counts {
			read(mode.String(), "dev")
		} else {
			read(mode.String())
		}
	}
	do(os.Chmod(path, 0o600))
	do(os.Chown(path, 1, 0))
	read("of another user")
	do(os.Chown(path, 0, 1))
	read("of root", "dev")
	do(os.Remove(netNS))
	read("without its network namespace")
	write(netNS, "")
	read("with the file of an earlier boot in its place")
	do(os.Remove(netNS))
	do(os.Symlink("/proc/self/ns/net", netNS))
	read("with it", "dev")
	boot = time.Now().Add(time.Hour)
	read("of an earlier boot")
	boot = time.Now().Add(-time.Hour)
	moved := filepath.Join(t.TempDir(), "file")
	do(os.Rename(path, moved))
	read("a file that is gone")
	do(os.Symlink(moved, path))
	read("a symlink")
	do(os.Remove(path))
	do(os.Mkdir(path, 0o700))
	read("a directory")
	do(os.Remove(path))
	write(path, file(netNS, args, result)+strings.Repeat(" ", 1<<20))
	read("a large file")
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
