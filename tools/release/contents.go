// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/blakesmith/ar"
	"github.com/cavaliergopher/cpio"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// programsIn returns the programs in an archive, package or image of a release, as ARCH/NAME, nil for
// another file.
func programsIn(file string) ([]fileSum, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var read func([]byte, func(string, fs.FileMode, []byte) error) error
	var arch string
	name := filepath.Base(file)
	switch m := regexp.MustCompile(`_linux_(\w+)\.tar\.gz$|_(\w+)\.deb$|\.(\w+)\.rpm$`).FindStringSubmatch(name); {
	case isImage(name):
		return programsInImage(data)
	case m == nil:
		return nil, nil
	case m[1] != "":
		read, arch = readTarGz, m[1]
	case m[2] != "":
		read, arch = readDeb, m[2]
	default:
		read, arch = readRPM, m[3]
		if goarch, differs := map[string]string{"x86_64": "amd64", "aarch64": "arm64"}[arch]; differs {
			arch = goarch
		}
	}
	c := collector{arch: arch}
	if err := errors.Join(read(data, c.add), c.err()); err != nil {
		return nil, err
	}
	return c.found, nil
}

func isImage(name string) bool {
	return strings.Contains(name, "_image") && strings.HasSuffix(name, ".tar")
}

// collector collects the programs among files.
type collector struct {
	arch  string
	found []fileSum
}

func (c *collector) add(name string, _ fs.FileMode, data []byte) error {
	if base := path.Base(name); programs()[base] != "" && bytes.HasPrefix(data, []byte("\x7fELF")) {
		c.found = append(c.found, fileSum{sumOf(data), c.arch + "/" + base})
	}
	return nil
}

func (c *collector) err() error {
	if len(c.found) != len(programs()) {
		return fmt.Errorf("has %d programs for %s, want %d", len(c.found), c.arch, len(programs()))
	}
	return nil
}

func readTarGz(data []byte, add func(string, fs.FileMode, []byte) error) error {
	zip, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return err
	}
	return readTar(zip, add)
}

func readTar(in io.Reader, add func(string, fs.FileMode, []byte) error) error {
	archive := tar.NewReader(in)
	return readMembers(archive, func() (string, fs.FileMode, error) {
		h, err := archive.Next()
		if err != nil {
			return "", 0, err
		}
		return h.Name, h.FileInfo().Mode(), nil
	}, add)
}

// maxUnpacked is more than what the members of an archive have together.
const maxUnpacked = 256 << 20

// bounded is a reader that fails after so many bytes: the members of a small archive, which can be compressed
// and sparse, can have more than this machine's memory.
type bounded struct {
	io.Reader
	left int
}

func (b *bounded) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if b.left -= n; b.left < 0 {
		return 0, fmt.Errorf("unpacks to more than %d MiB", maxUnpacked>>20)
	}
	return n, err
}

// readMembers reads an archive until next returns io.EOF.
func readMembers(archive io.Reader, next func() (string, fs.FileMode, error), add func(string, fs.FileMode, []byte) error) error {
	archive = &bounded{archive, maxUnpacked}
	for {
		name, mode, err := next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		data, err := io.ReadAll(archive)
		if err != nil {
			return err
		}
		if err := add(name, mode, data); err != nil {
			return err
		}
	}
}

func readDeb(data []byte, add func(string, fs.FileMode, []byte) error) error {
	for archive := ar.NewReader(bytes.NewReader(data)); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return errors.New("has no data.tar.gz")
		}
		if err != nil {
			return err
		}
		member, err := io.ReadAll(archive)
		if err != nil {
			return err
		}
		if strings.TrimSuffix(h.Name, "/") == "data.tar.gz" {
			return readTarGz(member, add)
		}
	}
}

func readRPM(data []byte, add func(string, fs.FileMode, []byte) error) error {
	payload, err := rpmPayload(data)
	if err != nil {
		return err
	}
	zip, err := gzip.NewReader(bytes.NewReader(payload))
	if err != nil {
		return err
	}
	archive := cpio.NewReader(zip)
	return readMembers(archive, func() (string, fs.FileMode, error) {
		h, err := archive.Next()
		if err != nil {
			return "", 0, err
		}
		return h.Name, h.FileInfo().Mode(), nil
	}, add)
}

// rpmPayload returns the payload of an .rpm. Before it are a lead of 96 bytes, the header of the
// signature, padded to 8 bytes, and the header: each 16 bytes, 16 bytes an entry, and the entries' data.
func rpmPayload(data []byte) ([]byte, error) {
	const lead, intro, entry = 96, 16, 16
	at := lead
	for range 2 {
		at += (8 - at%8) % 8
		if len(data) < at+intro || !bytes.HasPrefix(data[at:], []byte{0x8e, 0xad, 0xe8, 1}) {
			return nil, errors.New("is no .rpm")
		}
		at += intro + entry*int(binary.BigEndian.Uint32(data[at+8:])) + int(binary.BigEndian.Uint32(data[at+12:]))
	}
	return data[min(at, len(data)):], nil
}

// imageDigest returns the digest by which a registry knows the image of an OCI archive, whose index names nothing else.
func imageDigest(file string) (digest string, err error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	err = readTar(bytes.NewReader(data), func(name string, _ fs.FileMode, data []byte) error {
		if name != "index.json" {
			return nil
		}
		var index v1.Index
		if err := json.Unmarshal(data, &index); err != nil {
			return err
		}
		if len(index.Manifests) != 1 {
			return fmt.Errorf("index.json has %d images, want 1", len(index.Manifests))
		}
		digest = printable(string(index.Manifests[0].Digest))
		return nil
	})
	return digest, err
}

// programsInImage returns the programs in the images of an OCI archive. Each blob must be what its name says.
func programsInImage(data []byte) ([]fileSum, error) {
	members := map[string][]byte{}
	blobOf := func(d v1.Descriptor) []byte {
		return members["blobs/sha256/"+strings.TrimPrefix(string(d.Digest), "sha256:")]
	}
	err := readTar(bytes.NewReader(data), func(name string, mode fs.FileMode, data []byte) error {
		if sum, isBlob := strings.CutPrefix(name, "blobs/sha256/"); isBlob && !mode.IsDir() && sum != sumOf(data) {
			return fmt.Errorf("the blob %s has been changed", sum)
		}
		members[name] = data
		return nil
	})
	if err != nil {
		return nil, err
	}
	var found []fileSum
	var walk func(index []byte) error
	walk = func(text []byte) error {
		var index v1.Index
		if err := json.Unmarshal(text, &index); err != nil {
			return err
		}
		for _, d := range index.Manifests {
			blob := blobOf(d)
			if d.MediaType == v1.MediaTypeImageIndex {
				if err := walk(blob); err != nil {
					return err
				}
				continue
			}
			var manifest v1.Manifest
			var config v1.Image
			if err := json.Unmarshal(blob, &manifest); err != nil {
				return err
			}
			if err := json.Unmarshal(blobOf(manifest.Config), &config); err != nil {
				return err
			}
			c := collector{arch: printable(config.Architecture)}
			for _, layer := range manifest.Layers {
				if err := readTarGz(blobOf(layer), c.add); err != nil {
					return err
				}
			}
			if err := c.err(); err != nil {
				return err
			}
			found = append(found, c.found...)
		}
		return nil
	}
	if err := walk(members["index.json"]); err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, errors.New("has no image")
	}
	return found, nil
}
